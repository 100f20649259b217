"""Models of one server, found by the names that requests give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from mega_common.errors import ConfigError
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.model_service import ModelService
from mega_eval.server.request_validation import StrictRequestModel

AdapterName = Annotated[str, Field(min_length=1, max_length=200)]


class LoadAdapterRequest(StrictRequestModel):
    """Body of a request to /v1/load_lora_adapter, as in vLLM."""

    lora_name: AdapterName
    lora_path: Annotated[
        str, Field(min_length=1, description="folder of the adapter, in the server's --adapter-folder")
    ]
    base_model_name: Annotated[str | None, Field(description="served model; default: the first")] = None


class UnloadAdapterRequest(StrictRequestModel):
    """Body of a request to /v1/unload_lora_adapter, as in vLLM."""

    lora_name: AdapterName


class ServedModels:
    """Models of a server, each with its own engine, and their adapters; names are unique.

    Args:
        services: the models; the first answers requests without a model name.
        adapter_folder: folder from which clients may load adapters; None: they may not.
    """

    def __init__(self, services: Sequence[ModelService], adapter_folder: Path | None = None) -> None:
        self.services, self._folder = tuple(services), adapter_folder
        self.main = self.services[0]
        self._loading: set[str] = set()  # names of adapters that are being loaded
        names = self.list_model_names()
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"the model name {name!r} is used twice", hint="give each model and adapter its own")

    def list_model_names(self) -> list[str]:
        """Return the names of all models and adapters."""
        return [name for service in self.services for name in (service.name, *service.adapters)]

    def find_model_service(self, name: str | None) -> ModelService:
        """Return the service of the model or adapter called `name` (None: the first model); an ApiRequestError if unknown.

        Raises:
            ApiRequestError: 404 for an unknown name.
        """
        for service in self.services:
            if name in (None, service.name, *service.adapters):
                return service
        served = ", ".join(f"`{known}`" for known in self.list_model_names())
        message = f"The model `{name}` does not exist. This server has {served}."
        raise ApiRequestError(404, message, param="model", code="model_not_found")

    async def load_adapter(self, body: LoadAdapterRequest) -> None:
        """Load an adapter into a running model; an ApiRequestError if its name is in use or its folder is not allowed.

        Raises:
            ApiRequestError: when clients may not load adapters, the name is taken, or the folder is outside.
            CheckpointError: when it is not an adapter of the model.
        """
        folder = self._check_allowed()
        if body.lora_name in (*self.list_model_names(), *self._loading):
            raise ApiRequestError(
                400, f"the name {body.lora_name!r} is in use; unload that adapter first", param="lora_name"
            )
        path = (folder / body.lora_path).resolve()
        if not path.is_relative_to(folder) or not path.is_dir():
            raise ApiRequestError(
                404, "lora_path must be a folder inside the server's --adapter-folder", param="lora_path"
            )
        self._loading.add(body.lora_name)
        try:
            await self.find_model_service(body.base_model_name).load_adapter(body.lora_name, str(path))
        finally:
            self._loading.remove(body.lora_name)

    async def unload_adapter(self, body: UnloadAdapterRequest) -> None:
        """Remove an adapter from a running model; an ApiRequestError if it does not exist or clients may not.

        Raises:
            ApiRequestError: when clients may not, or there is no such adapter.
            DataError: when requests use it.
        """
        self._check_allowed()
        service = next((one for one in self.services if body.lora_name in one.adapters), None)
        if service is None:
            raise ApiRequestError(404, f"The adapter `{body.lora_name}` does not exist.", param="lora_name")
        await service.unload_adapter(body.lora_name)

    def _check_allowed(self) -> Path:
        """Return the folder of adapters that clients may load."""
        if self._folder is None:
            raise ApiRequestError(
                403, "this server does not load adapters for clients; start it with --adapter-folder FOLDER"
            )
        return self._folder.resolve()
