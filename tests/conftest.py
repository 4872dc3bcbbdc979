"""The same surroundings and the same examples on every machine; every annotated shape checked."""

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from jaxtyping import install_import_hook

from support.surroundings import settle

# prompts and layers are left out: they take whatever users give, and their business is to refuse it in words
ROOMS = (
    "bench",
    "collisions",
    "distances",
    "figures",
    "geometry",
    "inversion",
    "leak",
    "models",
    "states",
    "theory",
    "training",
)
install_import_hook([f"preimage.{room}" for room in ROOMS], "beartype.beartype")

settle()

import pytest  # noqa: E402  # the hook must be in place before preimage is imported
import torch  # noqa: E402

from preimage.models import ALIASES, LanguageModel, converted_folder, load  # noqa: E402

torch.set_num_threads(1)

# How fast examples are drawn says nothing about correctness. Without --hypothesis-profile the examples are
# those of every other run; `make search` looks for new ones, and keeps the failures it finds.
_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, database=None, **_ANY_SPEED)
settings.register_profile("search", max_examples=1000, print_blob=True, **_ANY_SPEED)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile", default=None) in (None, "same"):
        # Constants of whatever modules were imported so far are among the examples, even of a fixed seed:
        # what a worker ran before, and every edit of the source, would change them.
        providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    if not converted_folder(ALIASES["smollm2"]).is_dir():
        pytest.fail("SmolLM2 is not in the cache; run `make model` once")
    return load("smollm2")


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)
