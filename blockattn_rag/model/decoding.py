"""Generation from stored blocks with transformers' own ``generate``."""

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
from blockattn_rag.model.caches import isolated_caches
from blockattn_rag.model.constraint import GrammarConstraint, until_end
from blockattn_rag.model.repetition import Matching
from blockattn_rag.model.sampling import Sampling


class _AfterEachStep(StoppingCriteria):
    """Stopping criterion that reports each step's tokens, and ends finished rows or the run.

    A streamer would be too late: ``generate`` evaluates stopping criteria before it streams.

    Args:
        is_cancelled: Callback that returns whether to end the run.
        on_tokens: Callback that receives the newest token of every row, and returns whether each
            row has ended.
        prompt_width: Number of prompt tokens, including padding.
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
        # Length in tokens of each row that has ended, without its padding.
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        met: Any = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if self._on_tokens is not None:
            for newest in input_ids[:, self._seen :].T.tolist():
                # In speculative decoding, a step has several tokens.
                self._seen += 1
                ended = self._on_tokens(newest)
                for row in (row for row, has_ended in enumerate(ended) if has_ended):
                    self.lengths.setdefault(row, self._seen - self._prompt_width)
            met[list(self.lengths)] = True
        return met | self._is_cancelled()


class _EndsBeams(StoppingCriteria):
    """Ends beams at stop strings, because beam search does not stream tokens to the caller."""

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
    """Generate answers to a batch of (context ids, final ids), both padded on the left.

    The arguments are those of ``BlockModel.generate_batch``. Padding does not affect positions,
    which count real tokens only.
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
    # In beam search, tokens are not final before the search ends.
    on_tokens = None if has_beams else on_tokens
    step = _AfterEachStep(is_cancelled or (lambda: False), on_tokens, width)
    _add_criterion(arguments, step)
    if has_beams and (stop := stop_strings(hf_model, sampling)):
        _add_criterion(arguments, _EndsBeams(tokenizer, stop, width))
    constraint = _add_grammars(hf_model, tokenizer, arguments, matchers, width, on_failure)
    output = _run(hf_model, sampling, input_ids, mask, cache, arguments)
    ends = end_token_ids(hf_model, tokenizer, arguments)
    rows = enumerate(output[: len(prompts), width:].tolist())
    answers = [_with_end(row[: step.lengths.get(index)], ends) for index, row in rows]
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
    """Generate greedy full-mode answers to several prompts, with the logits of each token.

    Each token is the argmax of the raw logits. Settings of the model's generation config, such as
    penalties or beams, are ignored.

    Args:
        hf_model: The model. No other thread may run it during the call.
        prompts: Token ids, at least one per prompt. Prompt and answer must fit in the context
            window together.
        max_new_tokens: Maximum length of an answer.

    Returns:
        For each prompt, the answer's token ids, int64 ``[n]``, including the end token, and their
        unprocessed logits ``[n, vocab]``. Both are on the model's device.
    """
    ends = end_token_ids(hf_model, tokenizer)
    pad = min(ends, default=0)
    ids, mask = (rows.to(hf_model.device) for rows in _left_padded(prompts, pad))
    # `generate` uses the model's generation config for every unset option, even if a config is
    # passed. Each of its settings must therefore be unset explicitly.
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
        lengths = [len(_with_end(row, ends)) for row in answers.tolist()]
    return [(a[:n], of[:n]) for a, of, n in zip(answers, logits, lengths, strict=True)]


def _left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids ``[rows, width]``, and the attention mask: 1 for tokens, 0 for padding."""
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
    seed = sampling.seed  # A seeded run does not change the global random state.
    with torch.inference_mode(), torch.random.fork_rng(enabled=seed is not None), isolated_caches():
        if seed is not None:
            torch.manual_seed(seed)
        run: Any = hf_model.generate
        output = run(input_ids, attention_mask=attention_mask, past_key_values=cache, **arguments)
    return output if isinstance(output, torch.Tensor) else output.sequences


def draws_tokens(sampling: Sampling) -> bool:
    """Whether generation may draw random numbers, because it samples or has a seed."""
    do_sample = sampling.extra.get("do_sample", bool(sampling.temperature))
    config: Any = sampling.extra.get("generation_config")
    return bool(do_sample or getattr(config, "do_sample", False)) or sampling.seed is not None


def _arguments(
    hf_model: PreTrainedModel,
    tokenizer: Any,
    sampling: Sampling,
    max_new_tokens: int,
) -> dict[str, Any]:
    """``Sampling`` as arguments of transformers' ``generate``."""
    samples = bool(sampling.temperature)
    arguments: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": samples,
        "use_cache": True,
        "pad_token_id": _pad_token_id(hf_model, tokenizer),
        "stop_strings": None,  # The caller searches the answer for stop strings.
    }
    for name in ("temperature", "top_p", "top_k"):
        # Unset these for greedy decoding, even if the model's generation config sets them.
        value = getattr(sampling, name) if samples else None
        if value is not None or not samples:
            arguments[name] = value
    configs = (sampling.extra.get("generation_config"), hf_model.generation_config)
    if all(getattr(config, "eos_token_id", None) is None for config in configs):
        arguments["eos_token_id"] = tokenizer.eos_token_id
    return arguments | sampling.extra


def stop_strings(hf_model: PreTrainedModel, sampling: Sampling) -> tuple[str, ...]:
    """Strings that end an answer, from the sampling options and the generation config."""
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
    """Constrain each row to its grammar, after the caller's own logits processors."""
    if all(one is None for one in matchers):
        return None
    ends = end_token_ids(hf_model, tokenizer, arguments)
    if not ends:
        raise ValueError("A grammar requires an end token, but no eos_token_id is set")
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
    """Reject speculative decoding, for which ``generate`` is incorrect with a prefilled cache."""
    if asked := _drafts(hf_model, arguments):
        raise ValueError(
            f"Speculative decoding ({', '.join(asked)}) is not supported in block mode, because "
            "its results are not exact: remove these options, or use mode='full'"
        )


def _drafts(hf_model: PreTrainedModel, arguments: Mapping[str, Any]) -> list[str]:
    """Names of the options that enable speculative decoding."""
    config: Any = arguments.get("generation_config", hf_model.generation_config)
    return [n for n in _DRAFTS if arguments.get(n) or getattr(config, n, None)]


def fills_in_order(hf_model: PreTrainedModel, sampling: Sampling) -> bool:
    """Whether ``generate`` fills its cache in order: first the prompt, then the answer token by
    token. False with beams, speculative decoding, another cache type, or ``extra`` options other
    than ``do_sample``."""
    config: Any = hf_model.generation_config
    others = [n for n in (*_DRAFTS, "cache_implementation") if getattr(config, n, None)]
    others += sampling.extra.keys() - {"do_sample"}
    return not others and _beams(hf_model, {}) == 1


def takes_likeliest(hf_model: PreTrainedModel, sampling: Sampling) -> bool:
    """Whether decoding is greedy, without beams, speculative decoding or ``extra`` options."""
    return not (sampling.temperature or sampling.extra) and fills_in_order(hf_model, sampling)


def _beams(hf_model: PreTrainedModel, arguments: dict[str, Any]) -> int:
    config: Any = arguments.get("generation_config", hf_model.generation_config)
    return int(arguments.get("num_beams") or config.num_beams or 1)


# Settings that do not depend on the prompt's tokens, which include padding in a batch.
_BATCH_SAFE = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("do_sample", "temperature", "top_p", "top_k", "min_p", "max_length", "max_new_tokens"),
        *("transformers_version", "_from_model_config", "output_attentions", "use_cache"),
        *("output_hidden_states", "return_dict_in_generate", "stop_strings"),
    }
)


def batches_exactly(hf_model: PreTrainedModel, sampling: Sampling) -> bool:
    """Whether batching leaves the answer to each prompt unchanged.

    False for beams, which take up rows of the batch, for penalties, which count padding as text,
    and for seeds, because random numbers depend on the row.
    """
    given = {*hf_model.generation_config.to_diff_dict(), *sampling.extra}
    seeded = sampling.seed is not None and bool(sampling.temperature or sampling.extra)
    ends = sampling.extra.get("eos_token_id", ())
    # Only plain ids are safe, neither None nor a tensor, whose length may differ.
    plain = isinstance(ends, (int, list, tuple))
    return given <= _BATCH_SAFE and plain and not seeded


def end_token_ids(
    hf_model: PreTrainedModel, tokenizer: Any, arguments: Mapping[str, Any] | None = None
) -> set[int]:
    """Ids of the tokens that end an answer if ``generate`` is called with these arguments."""
    given = arguments or {}
    configs = (given.get("generation_config"), hf_model.generation_config, tokenizer)
    own = (getattr(config, "eos_token_id", None) for config in configs)
    first = next((token for token in own if token is not None), None)
    ends = given.get("eos_token_id", first)  # With an explicit None, answers never end.
    ends = ends.flatten().tolist() if isinstance(ends, Tensor) else ends
    return set() if ends is None else set(ends) if isinstance(ends, (list, tuple)) else {ends}


def _pad_token_id(hf_model: PreTrainedModel, tokenizer: Any) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return min(end_token_ids(hf_model, tokenizer), default=0)


def _with_end(ids: list[int], ends: set[int]) -> list[int]:
    """Cut a row after its end token, which padding follows in rows that end early."""
    return ids[: len(until_end(ids, ends)) + 1]
