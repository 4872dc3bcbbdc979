"""Every annotated shape and type of the rooms that hold tensors is checked while the tests run."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may wait for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

# prompts is left out: it takes whatever users give and its business is to refuse it in words
ROOMS = (
    "bench",
    "collisions",
    "distances",
    "execution",
    "geometry",
    "inversion",
    "layers",
    "models",
    "report",
    "results",
    "states",
    "theory",
)
install_import_hook([f"preimage.{room}" for room in ROOMS], "beartype.beartype")

import pytest  # noqa: E402  # the hook must be in place before preimage is imported
import torch  # noqa: E402

from preimage.models import ALIASES, LanguageModel, converted_folder, load  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism; threads on top of them only fight


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    if not converted_folder(ALIASES["smollm2"]).is_dir():
        pytest.fail("SmolLM2 is not in the cache; run `make model` once")
    return load("smollm2")


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)
