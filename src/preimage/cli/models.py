"""``preimage models``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from preimage.cli.arguments import Json
from preimage.cli.terminal import print_either, print_table

TESTED = (
    "GPT-2", "GPT-NeoX", "OPT", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma 2", "Gemma 3 (text)",
    "Phi-3", "OLMo 2", "Mixtral (mixture of experts)",
)  # fmt: skip


def models(
    name: Annotated[str | None, typer.Argument(help="Load this model and describe it.")] = None,
    fetch: Annotated[
        str | None, typer.Option(help="Download and convert this model now, if it is not here yet.")
    ] = None,
    json: Json = False,
) -> None:
    """List the models that need no hub, fetch one, or describe one."""
    from preimage.models import ALIASES, converted_folder, locate

    document: dict[str, Any] = {}
    if fetch is not None:
        files = locate(fetch)
        document |= {"name": fetch, "path": str(files.path), "revision": files.revision}
        lines = [f"{fetch} is ready in {files.path}"]
    elif name is not None:
        files = locate(name)  # an unknown name is refused before torch is imported
        from preimage.models import load

        model = load(files)
        document["model"] = model.identity.to_dict() | {"max_length": model.max_length}
        lines = [f"{key}: {value}" for key, value in document["model"].items()]
    else:
        rows = [
            [alias.name, alias.title, "yes" if converted_folder(alias).is_dir() else "no"]
            for alias in ALIASES.values()
        ]
        document["aliases"] = [
            {"name": name, "title": title, "ready": ready == "yes"} for name, title, ready in rows
        ]
        document["tested_architectures"] = list(TESTED)
        lines = [f"Tested architectures: {', '.join(TESTED)}.",
                 "Hub ids, folders of safetensors and GGUF files of these work as well."]  # fmt: skip
        if not json:
            print_table("Models that need no hub", ["name", "model", "ready"], rows, prose=["model"])
    print_either(json, "models", document, *lines)
