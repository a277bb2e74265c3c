"""Where peers are: one interface, many sources."""

from services.gateway.discovery.parse import address_source
from services.gateway.discovery.sources import AddressSource, StaticAddresses
from services.gateway.discovery.subset import Subset

__all__ = ["AddressSource", "StaticAddresses", "Subset", "address_source"]
