"""From placed blocks to tokens, by transformers' own ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from blockattn_rag.errors import GrammarError
from blockattn_rag.model.caches import running_with
from blockattn_rag.model.constraint import GrammarConstraint
from blockattn_rag.model.repetition import Matching
from blockattn_rag.model.sampling import Sampling


class _AfterEachStep(StoppingCriteria):
    """Hands over the tokens of each step, ends rows that need no more, and ends cancelled runs.

    A streamer would get the tokens too late: ``generate`` asks its stopping criteria first.

    Args:
        is_cancelled: Whether to end the run.
        on_tokens: Takes the newest token of every row and returns which rows have ended.
        prompt_width: Tokens of the prompt, padding included.
    """

    def __init__(
        self,
        is_cancelled: Callable[[], bool],
        on_tokens: Callable[[list[int]], Sequence[bool]] | None,
        prompt_width: int,
    ) -> None:
        self._is_cancelled = is_cancelled
        self._on_tokens = on_tokens
        self._prompt_width = self._seen = prompt_width
        self.lengths: dict[int, int] = {}  # tokens of rows that have ended; padding follows

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        met: Any = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if self._on_tokens is not None:
            for newest in input_ids[:, self._seen :].T.tolist():  # several with a draft
                self._seen += 1
                ended = self._on_tokens(newest)
                for row in (row for row, has_ended in enumerate(ended) if has_ended):
                    self.lengths.setdefault(row, self._seen - self._prompt_width)
            met[list(self.lengths)] = True
        return met | self._is_cancelled()


class _EndsBeams(StoppingCriteria):
    """Ends beams at stop strings, because their tokens are not handed over as they come."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt_width: int) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        texts = self._tokenizer.batch_decode(
            input_ids[:, self._prompt_width :],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        met = [any(string in text for string in self._stop) for text in texts]
        return torch.tensor(met, device=input_ids.device)


def generate(
    hf_model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[tuple[Sequence[int], Sequence[int]]],
    sampling: Sampling,
    max_new_tokens: int,
    cache: DynamicCache | None,
    on_tokens: Callable[[list[int]], Sequence[bool]] | None,
    is_cancelled: Callable[[], bool] | None,
    matchers: Sequence[Matching | None] = (),
    on_failure: Callable[[int, GrammarError], object] | None = None,
) -> list[list[int]]:
    """New tokens for several (context ids, final ids), padded on the left of each part.

    The arguments are those of ``BlockModel.generate_batch``. Positions are counted over real tokens
    only, so padding changes nothing but the batch's shape.
    """
    pad = _pad_token_id(hf_model, tokenizer)
    if cache is None:
        prompts = [((), [*context, *final]) for context, final in prompts]
    context_ids, context_mask = _left_padded([c for c, _ in prompts], pad)
    final_ids, final_mask = _left_padded([f for _, f in prompts], pad)
    input_ids = torch.cat([context_ids, final_ids], dim=1).to(hf_model.device)
    mask = torch.cat([context_mask, final_mask], dim=1).to(hf_model.device)
    width = input_ids.shape[1]
    arguments = _arguments(hf_model, tokenizer, sampling, max_new_tokens)
    if cache is not None:
        _check_no_draft(hf_model, arguments)
    has_beams = _beams(hf_model, arguments) > 1
    # Beam search has no tokens to hand out before it ends.
    on_tokens = None if has_beams else on_tokens
    step = _AfterEachStep(is_cancelled or (lambda: False), on_tokens, width)
    _add_criterion(arguments, step)
    if has_beams and (stop := stop_strings(hf_model, sampling)):
        _add_criterion(arguments, _EndsBeams(tokenizer, stop, width))
    constraint = _add_grammars(hf_model, tokenizer, arguments, matchers, width, on_failure)
    output = _run(hf_model, sampling, input_ids, mask, cache, arguments)
    ends = end_token_ids(hf_model, tokenizer, arguments)
    rows = enumerate(output[: len(prompts), width:].tolist())
    answers = [_until_end(row[: step.lengths.get(index)], ends) for index, row in rows]
    if constraint is not None:
        for place, answer in enumerate(answers):
            constraint.check_answer(answer, place)
    return answers


# `generate` compares these with numbers, so they cannot be None.
_ONE_ANSWER = {"num_beams": 1, "num_return_sequences": 1}


def greedy_answers(
    hf_model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[tuple[Tensor, Tensor]]:
    """Full mode's greedy answers to several prompts, with what the model predicts at each token.

    Each token is the likeliest one, also where the model's generation config asks for penalties,
    beams or the like: the logits tell what the model predicts, and the answer follows from them.

    Args:
        hf_model: the model. Nobody else may run it meanwhile.
        tokenizer: its transformers tokenizer.
        prompts: token ids, at least one each; with the answer they fit in the context window.
        max_new_tokens: longest answer.

    Returns:
        For each prompt its answer, the token that ends it included, int64 ``[n]``, and the logits
        ``[n, vocab]`` of the answer's tokens, before any processing; on the model's device.
    """
    ends = end_token_ids(hf_model, tokenizer)
    pad = min(ends, default=0)
    ids, mask = (rows.to(hf_model.device) for rows in _left_padded(prompts, pad))
    # `generate` fills what is missing from the model's generation config, so a config of our own
    # would not do: each of its settings is undone.
    unset = dict.fromkeys(hf_model.generation_config.to_diff_dict()) | _ONE_ANSWER
    arguments = unset | {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "use_cache": True,
        "eos_token_id": sorted(ends) or None,
        "pad_token_id": pad,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with torch.inference_mode():
        run: Any = hf_model.generate
        out = run(ids, attention_mask=mask, **arguments)
        logits = torch.stack(out.logits, dim=1)  # [rows, answer tokens, vocab]
        answers = out.sequences[:, ids.shape[1] :]
        lengths = [len(_until_end(row, ends)) for row in answers.tolist()]
    return [(a[:n], of[:n]) for a, of, n in zip(answers, logits, lengths, strict=True)]


def _left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids ``[rows, width]``, and where they are no padding (1)."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
    return pad_left(ids, padding_value=pad), pad_left([torch.ones_like(row) for row in ids])


def _run(
    hf_model: PreTrainedModel,
    sampling: Sampling,
    input_ids: Tensor,
    attention_mask: Tensor,
    cache: DynamicCache | None,
    arguments: dict[str, Any],
) -> Tensor:
    if cache is not None and (beams := _beams(hf_model, arguments)) > 1:
        cache.batch_repeat_interleave(beams)
    seed = sampling.seed  # of a seeded run, which leaves random state as it was
    with torch.inference_mode(), torch.random.fork_rng(enabled=seed is not None), running_with():
        if seed is not None:
            torch.manual_seed(seed)
        run: Any = hf_model.generate
        output = run(input_ids, attention_mask=attention_mask, past_key_values=cache, **arguments)
    return output if isinstance(output, torch.Tensor) else output.sequences


def draws_tokens(sampling: Sampling) -> bool:
    """Whether random state decides the tokens; with a seed, a caller's own processors may draw."""
    do_sample = sampling.extra.get("do_sample", bool(sampling.temperature))
    config: Any = sampling.extra.get("generation_config")
    return bool(do_sample or getattr(config, "do_sample", False)) or sampling.seed is not None


def _arguments(
    hf_model: PreTrainedModel,
    tokenizer: Any,
    sampling: Sampling,
    max_new_tokens: int,
) -> dict[str, Any]:
    """``Sampling`` in the words of transformers' ``generate``."""
    samples = bool(sampling.temperature)
    arguments: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": samples,
        "use_cache": True,
        "pad_token_id": _pad_token_id(hf_model, tokenizer),
        "stop_strings": None,  # whoever reads the tokens looks for them, in the answer alone
    }
    for name in ("temperature", "top_p", "top_k"):
        # Greedy choice takes none of these, though a model's own generation config may hold some.
        value = getattr(sampling, name) if samples else None
        if value is not None or not samples:
            arguments[name] = value
    if hf_model.generation_config.eos_token_id is None:
        arguments["eos_token_id"] = tokenizer.eos_token_id
    return arguments | sampling.extra


def stop_strings(hf_model: PreTrainedModel, sampling: Sampling) -> tuple[str, ...]:
    """Strings that end an answer: the call's, and those of the generation config."""
    config: Any = sampling.extra.get("generation_config") or hf_model.generation_config
    given = config.stop_strings or hf_model.generation_config.stop_strings or ()
    return (*sampling.stop, *((given,) if isinstance(given, str) else given))


def _add_criterion(arguments: dict[str, Any], criterion: StoppingCriteria) -> None:
    criteria = [*arguments.get("stopping_criteria", []), criterion]
    arguments["stopping_criteria"] = StoppingCriteriaList(criteria)


def _add_grammars(
    hf_model: PreTrainedModel,
    tokenizer: Any,
    arguments: dict[str, Any],
    matchers: Sequence[Matching | None],
    prompt_width: int,
    on_failure: Callable[[int, GrammarError], object] | None = None,
) -> GrammarConstraint | None:
    """Constrain each row to its grammar, after whatever processors the caller has."""
    if all(one is None for one in matchers):
        return None
    ends = end_token_ids(hf_model, tokenizer, arguments)
    if not ends:
        raise ValueError("a grammar needs a token that ends the answer; found no eos_token_id")
    constraint = GrammarConstraint(
        matchers,
        prompt_width,
        ends,
        pad=arguments["pad_token_id"],
        has_strays=_beams(hf_model, arguments) > 1 or bool(_drafts(hf_model, arguments)),
        on_failure=on_failure,
    )
    processors = [*(arguments.get("logits_processor") or ()), constraint]
    arguments["logits_processor"] = LogitsProcessorList(processors)
    return constraint


_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


def _check_no_draft(hf_model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse drafts: with a cache that it did not fill itself, ``generate`` gets them wrong."""
    if asked := _drafts(hf_model, arguments):
        raise ValueError(
            f"{', '.join(asked)}: drafted tokens are not exact on stored blocks; leave it out, or "
            "use mode='full'"
        )


def _drafts(hf_model: PreTrainedModel, arguments: Mapping[str, Any]) -> list[str]:
    """Settings by which tokens are drafted."""
    config: Any = arguments.get("generation_config", hf_model.generation_config)
    return [n for n in _DRAFTS if arguments.get(n) or getattr(config, n, None)]


def fills_in_order(hf_model: PreTrainedModel, sampling: Sampling) -> bool:
    """Whether ``generate`` adds the prompt's tokens and then the answer's, one by one, to a cache
    that it is given: no beams, no drafts, no cache of another kind, no options of its own."""
    config: Any = hf_model.generation_config
    others = [n for n in (*_DRAFTS, "cache_implementation") if getattr(config, n, None)]
    return not (sampling.extra or others) and _beams(hf_model, {}) == 1


def takes_likeliest(hf_model: PreTrainedModel, sampling: Sampling) -> bool:
    """Whether the likeliest tokens are chosen, without options of transformers' own."""
    return not sampling.temperature and fills_in_order(hf_model, sampling)


def _beams(hf_model: PreTrainedModel, arguments: dict[str, Any]) -> int:
    config: Any = arguments.get("generation_config", hf_model.generation_config)
    return int(arguments.get("num_beams") or config.num_beams or 1)


# Settings that do not look back at the prompt, where a batch has padding.
_BATCH_SAFE = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("do_sample", "temperature", "top_p", "top_k", "min_p", "max_length", "max_new_tokens"),
        *("transformers_version", "_from_model_config", "output_attentions", "use_cache"),
        *("output_hidden_states", "return_dict_in_generate", "stop_strings"),
    }
)


def batches_exactly(hf_model: PreTrainedModel, sampling: Sampling) -> bool:
    """Whether every answer in a batch is the answer that its prompt gets alone.

    Beams share the batch, penalties count padding as text, and draws of a seed depend on the row.
    """
    given = {*hf_model.generation_config.to_diff_dict(), *sampling.extra}
    seeded = sampling.seed is not None and bool(sampling.temperature or sampling.extra)
    ends = sampling.extra.get("eos_token_id", ())
    plain = isinstance(ends, (int, list, tuple))  # neither None nor a tensor of another length
    return given <= _BATCH_SAFE and plain and not seeded


def end_token_ids(
    hf_model: PreTrainedModel, tokenizer: Any, arguments: Mapping[str, Any] | None = None
) -> set[int]:
    """Tokens that end an answer, given these arguments of ``generate``."""
    own = hf_model.generation_config.eos_token_id
    own = tokenizer.eos_token_id if own is None else own
    ends = (arguments or {}).get("eos_token_id", own)  # None, if given: an answer never ends
    ends = ends.flatten().tolist() if isinstance(ends, Tensor) else ends
    return set() if ends is None else set(ends) if isinstance(ends, (list, tuple)) else {ends}


def _pad_token_id(hf_model: PreTrainedModel, tokenizer: Any) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return min(end_token_ids(hf_model, tokenizer), default=0)


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    """A batch row up to its own end: rows that end early are padded."""
    end = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    return ids[: end + 1]
