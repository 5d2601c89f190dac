"""Models with windows, shared layers or latent layers, with vLLM's hybrid memory manager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.store import DirectoryStore
from tests_vllm.engines import Engine, running
from tests_vllm.reference import Case, Reference, assert_close
from tests_vllm.tiny import FAMILIES, WINDOW, Family, save


class Served(NamedTuple):
    reference: Reference
    engine: Engine
    family: Family

    def case(self, beyond: int) -> Case:
        """Return a prompt whose context ends ``beyond`` tokens after the start of a page."""
        case = self.reference.case(25, records=2)
        pad = (beyond - sum(case.lengths)) % self.family.page_tokens
        return self.reference.case(25, records=2, pad=pad)


@pytest.fixture(scope="module", params=list(FAMILIES))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    reference = Reference(folder, str(save(request.param, folder / "model")))
    family = FAMILIES[request.param]
    more = {"model": reference.name, "max_num_batched_tokens": 64, **(family.engine or {})}
    with running(reference.options(), **more) as engine:
        yield Served(reference, engine, family)


def test_the_hybrid_memory_manager_is_enabled(served: Served) -> None:
    config = served.engine.llm.llm_engine.vllm_config
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


# With the first value, a window starts at the start of a page.
@pytest.mark.parametrize("beyond", [WINDOW - 1, 0, 1, -1])
def test_answers_equal_those_of_the_local_engine(served: Served, beyond: int) -> None:
    reference, engine, page = served.reference, served.engine, served.family.page_tokens
    case = reference.stored(served.case(beyond))
    right = reference.answer(case)
    assert right != reference.answer(case, "full")
    assert right != reference.answer(case, recipe=Recipe(positions="composite"))  # without rotation
    answer = engine.block(case)
    assert answer.tokens == right
    assert answer.blocks["loaded_tokens"] == sum(case.lengths) > page
    again = engine.block(case)
    assert again.tokens == right
    # If a window starts at a page, none of its pages is full, so vLLM cannot cache them. On CPUs,
    # vLLM has no prefix cache for latent layers.
    is_cached = not served.family.is_latent and beyond != WINDOW - 1
    assert again.blocks["local_tokens"] >= (page if is_cached else 0)
    assert engine.full(case).tokens == reference.answer(case, "full")


def test_a_context_shorter_than_a_window_is_loaded(served: Served) -> None:
    reference = served.reference
    case = reference.stored(reference.case_of(("Read.\n", "One.", "Two or three.\n", "What?")))
    assert sum(case.lengths) < WINDOW
    assert served.engine.block(case).tokens == reference.answer(case)


def test_encoded_blocks_are_stored_with_all_their_tokens(served: Served) -> None:
    reference, engine = served.reference, served.engine
    case = reference.case(40, pad=2 * served.family.page_tokens)
    for block in case.blocks:
        if reference.key(block) not in DirectoryStore(reference.store):
            assert engine.encode([block]) == ["length"]
            assert_close(reference.written(block), reference.encoded(block))
    assert engine.block(case).tokens == reference.answer(case)
