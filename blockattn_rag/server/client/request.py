"""What a server is asked for an answer: token ids, where they are cut, and how to choose tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from blockattn_rag.engine.find_recipe import AUTO, RecipeLike
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.tokenised import Tokenised
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.prompts.sinks import is_sink
from blockattn_rag.server.protocol import BlockPlan

_OF_TRANSFORMERS = {"min_new_tokens": "min_tokens"}
_OF_THE_SERVER = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "min_tokens"),
    *("logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids", "ignore_eos"),
    *("priority", "repetition_detection"),
)
"""Arguments beside ``Sampling``'s own that vLLM takes."""

_LEAST_TOP_P = 1e-6


def sink_asked(recipe: RecipeLike | None) -> str | None:
    """The sink that a recipe requires of a server; None: any.

    Raises:
        ValueError: the recipe has more than a sink, which servers do not apply.
    """
    if recipe is None or recipe == AUTO:
        return None
    if isinstance(recipe, str) and is_sink(recipe):
        return recipe
    found = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    if found != Recipe(found.sink, fingerprints=found.fingerprints, model=found.model):
        raise ValueError(
            f"Found recipe {found}, but a server applies the sink of a recipe alone: use "
            "recipe='auto', or load the model in this process."
        )
    return found.sink


def check_possible(options: GenerateOptions) -> None:
    """Refuse what a server cannot do.

    Raises:
        ValueError: an option of block mode is not as it must be, or one of sampling is not known
            there.
    """
    if options.assembly != "auto" and options.mode == "block":
        raise ValueError(
            f"found assembly={options.assembly!r}, which a server's engine cannot do; leave it "
            "out, or load the model in this process"
        )
    known = (*_OF_THE_SERVER, *_OF_TRANSFORMERS)
    if unknown := sorted(options.sampling.extra.keys() - set(known)):
        raise ValueError(
            f"found {', '.join(unknown)}, which a server does not take; beside the options of "
            f"generate it takes {', '.join(known)}"
        )


class TokenPrompt(NamedTuple):
    """A prompt as token ids.

    ``blocks``: the context blocks that have tokens, the first one with BOS; ``context``: each of
    them tokenised; ``final``: ids of the final block, at least one.
    """

    blocks: list[Block]
    context: list[Tokenised]
    final: list[int]

    @property
    def ids(self) -> list[int]:
        """All token ids, in order."""
        return [*(token for one in self.context for token in one.ids), *self.final]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each context block."""
        return tuple(len(one.ids) for one in self.context)


def completion_body(
    model: str, ids: Sequence[int], plan: BlockPlan | None, limit: int, sampling: Sampling
) -> dict[str, Any]:
    """The body of a request for an answer.

    Args:
        model: its name at the server.
        ids: of the whole prompt.
        plan: how it is cut; None: the answer is computed in full mode.
        limit: tokens that may be generated.
        sampling: how they are chosen.
    """
    chosen = {
        "temperature": sampling.temperature or 0.0,
        "top_p": sampling.top_p and max(sampling.top_p, _LEAST_TOP_P),
        "top_k": sampling.top_k,
        "seed": _signed(sampling.seed),
        "stop": list(sampling.stop) or None,
        **{_OF_TRANSFORMERS.get(name, name): value for name, value in sampling.extra.items()},
        **(sampling.grammar.asked if sampling.grammar else {}),
        "kv_transfer_params": plan and plan.to_dict(),
    }
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": limit,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def _signed(seed: int | None) -> int | None:
    """A seed of 64 bits as the server takes it, which knows signed ones alone."""
    return seed if seed is None or seed < 1 << 63 else seed - (1 << 64)
