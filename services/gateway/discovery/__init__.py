"""Where peers are: one interface, many sources."""

from services.gateway.discovery.parse import address_source
from services.gateway.discovery.sources import AddressSource, StaticAddresses

__all__ = ["AddressSource", "StaticAddresses", "address_source"]
