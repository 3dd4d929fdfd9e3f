import pytest

from tests.training.world import World


@pytest.fixture
def world() -> World:
    return World()
