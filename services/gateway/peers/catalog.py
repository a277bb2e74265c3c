"""Which models the workers of a gateway serve, under which names and with which limits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest, ModelNotFound
from services.gateway.peers.worker import WorkerPeer


@dataclass(frozen=True, slots=True)
class Model:
    """A model that some worker serves, or served until it was lost.

    Where workers differ, the limits are those of the smallest.
    """

    name: str
    max_model_len: int
    vocab_size: int
    created: int  # when this gateway first saw it, in Unix seconds
    quantizations: tuple[str, ...] = ()  # of its workers' weights


class ModelCatalog:
    """The models of all workers and those that are expected to come, remembered until told to
    look again."""

    def __init__(self, workers: Iterable[WorkerPeer], expected: Sequence[str]) -> None:
        self._workers = workers
        self._expected: dict[str, Model | None] = dict.fromkeys(expected)  # as last seen
        self._first_seen: dict[str, int] = {}
        self._models: dict[str, Model] | None = None

    def look_again(self) -> None:
        """Call it when a worker came, went or changed."""
        self._models = None

    def models(self) -> Mapping[str, Model]:
        """The models by name. One whose workers are all away is still listed, for as long as
        they have an address, or once it was seen if it is an expected one."""
        if self._models is None:
            self._models = self._find()
        return self._models

    def named(self, name: str) -> Model | None:
        """The model, with or without a ready worker; empty means the only one.

        None if no model is known at all, or an expected one is not known yet. Raises
        ModelNotFound or InvalidRequest.
        """
        models = self.models()
        if name in models:
            return models[name]
        if not models:
            return None
        names = sorted({*models, *self._expected})
        if not name:
            if len(names) > 1:
                raise InvalidRequest(f"name a model: {', '.join(names)}", param="model")
            name = names[0]
        if name not in names:
            raise ModelNotFound(
                f"The model {name!r} does not exist; served: {', '.join(names)}", param="model"
            )
        return models.get(name)

    def expected_name(self, name: str) -> str:
        """The expected model that a request's name means; empty if it means none."""
        if not name and len(self._expected) == 1:
            return next(iter(self._expected))
        return name if name in self._expected else ""

    def _find(self) -> dict[str, Model]:
        by_name: dict[str, list[WorkerPeer]] = {}
        for worker in self._workers:
            if worker.info is not None:
                by_name.setdefault(worker.info.model, []).append(worker)
        found = {name: self._model(name, workers) for name, workers in by_name.items()}
        for name, before in self._expected.items():
            if name in found:
                self._expected[name] = found[name]
            elif before is not None:
                found[name] = before
        return dict(sorted(found.items()))

    def _model(self, name: str, workers: list[WorkerPeer]) -> Model:
        infos = [worker.info for worker in workers if worker.ready and worker.info]
        infos = infos or [worker.info for worker in workers if worker.info]
        return Model(
            name,
            min(info.max_model_len for info in infos),
            min(info.vocab_size for info in infos),
            self._first_seen.setdefault(name, int(time.time())),
            tuple(sorted({info.quantization or "none" for info in infos})),
        )
