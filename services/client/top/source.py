"""Asks a gateway what it sees of its fleet."""

from __future__ import annotations

import httpx
import msgspec

from services.client.endpoint import ApiError, Caller, Endpoint, error_text
from services.gateway.watch.shapes import FleetSnapshot

_SECONDS = 5.0  # that a gateway has to answer


class FleetSource(Caller):
    """One gateway. Raises StartupError if the endpoint's authorities cannot be used."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, _SECONDS)
        self.url = f"{endpoint.root}/fleet"

    async def read(self) -> bytes:
        """The fleet as the gateway writes it, in JSON. Raises ApiError."""
        try:
            response = await self._http.get(self.url)
        except httpx.TransportError as error:
            raise ApiError(f"nothing answers at {self.url} ({type(error).__name__})")
        if response.status_code == 404:
            raise ApiError(f"what answers at {self.url} is not a Shoal gateway")
        if response.status_code != 200:
            raise ApiError(error_text(response.content, response.status_code))
        return response.content


def decode(data: bytes) -> FleetSnapshot:
    """Raises ApiError if it is not what this version of Shoal knows as a fleet."""
    try:
        return msgspec.json.decode(data, type=FleetSnapshot)
    except msgspec.DecodeError as error:
        raise ApiError(f"the gateway's answer is not a fleet that this version knows: {error}")
