"""Generation with transformers' ``generate``, with or without a cache of stored blocks."""

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
    """Stopping criterion that reports each step's tokens, and ends rows or a cancelled batch.

    ``prompt_width``: Number of tokens in each prompt, including padding.
    """

    def __init__(
        self,
        is_cancelled: Callable[[], bool] | None,
        on_tokens: Callable[[list[int]], Sequence[bool]] | None,
        prompt_width: int,
    ) -> None:
        self._is_cancelled = is_cancelled
        self._on_tokens = on_tokens
        self._prompt_width = self._seen = prompt_width
        # Length in tokens of the answer in each row that has ended, without padding.
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        met: Any = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if self._on_tokens is not None:
            for newest in input_ids[:, self._seen :].T.tolist():
                # In speculative decoding, a step may have several tokens.
                self._seen += 1
                ended = self._on_tokens(newest)
                for row in (row for row, has_ended in enumerate(ended) if has_ended):
                    self.lengths.setdefault(row, self._seen - self._prompt_width)
            met[list(self.lengths)] = True
        return met | (self._is_cancelled is not None and self._is_cancelled())


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
    """Generate answers to a batch of prompts, with contexts and final blocks padded on the left.

    The arguments are those of ``BlockModel.generate_batch``, with a matcher for each grammar.
    Raises ``ValueError`` for speculative decoding with a cache, or a grammar without an end token.
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
    config: Any = arguments.get("generation_config", hf_model.generation_config)
    drafts = [name for name in _DRAFTS if arguments.get(name) or getattr(config, name, None)]
    beams = _beams(hf_model, arguments)
    if cache is not None and drafts:
        # `generate` verifies draft tokens incorrectly with a prefilled cache.
        raise ValueError(
            f"Speculative decoding ({', '.join(drafts)}) is not supported in block mode, because "
            "its results are not exact: remove these options, or use mode='full'"
        )
    # In beam search, tokens are not final before the search ends.
    step = _AfterEachStep(is_cancelled, None if beams > 1 else on_tokens, width)
    criteria = [*arguments.get("stopping_criteria", []), step]
    if beams > 1 and (stop := stop_strings(hf_model, sampling)):
        criteria.append(_EndsBeams(tokenizer, stop, width))
    arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
    ends = end_token_ids(hf_model, tokenizer, arguments)
    constraint = None
    if any(matcher is not None for matcher in matchers):
        if not ends:
            raise ValueError("A grammar needs an end token, but no eos_token_id is set: pass one")
        constraint = GrammarConstraint(
            matchers,
            width,
            ends,
            pad=arguments["pad_token_id"],
            has_strays=beams > 1 or bool(drafts),
            on_failure=on_failure,
        )
        processors = [*(arguments.get("logits_processor") or ()), constraint]
        arguments["logits_processor"] = LogitsProcessorList(processors)
    if cache is not None and beams > 1:
        cache.batch_repeat_interleave(beams)
    seed = sampling.seed  # A seeded run must not change the global random state.
    with torch.inference_mode(), torch.random.fork_rng(enabled=seed is not None), isolated_caches():
        if seed is not None:
            torch.manual_seed(seed)
        run: Any = hf_model.generate
        output = run(input_ids, attention_mask=mask, past_key_values=cache, **arguments)
    tokens: Tensor = output if isinstance(output, Tensor) else output.sequences
    rows = enumerate(tokens[: len(prompts), width:].tolist())
    answers = [_with_end(row[: step.lengths.get(index)], ends) for index, row in rows]
    if constraint is not None:
        for place, answer in enumerate(answers):
            constraint.check_answer(answer, place)
    return answers


def greedy_answers(
    hf_model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Generate greedy full-mode answers to several prompts, with the logits of each token.

    Each token is the argmax of the raw logits. Settings of the model's generation config, such as
    penalties or beams, are ignored. No other thread may run the model during the call.

    Returns:
        For each prompt, the answer's token ids, int64 ``[n]``, including the end token, and their
        unprocessed logits ``[n, vocab]``. Both are on the model's device.
    """
    ends = end_token_ids(hf_model, tokenizer)
    pad = min(ends, default=0)
    ids, mask = (rows.to(hf_model.device) for rows in _left_padded(prompts, pad))
    # For options that are not passed, `generate` uses the model's generation config, even if a
    # config is passed. Each of its settings must therefore be set to None explicitly.
    arguments = dict.fromkeys(hf_model.generation_config.to_diff_dict()) | {
        # `generate` compares these with numbers, so they cannot be None.
        "num_beams": 1,
        "num_return_sequences": 1,
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
    """Pad on the left. Returns ids ``[rows, width]``, and a mask: 1 for tokens, 0 for padding."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
    return pad_left(ids, padding_value=pad), pad_left([torch.ones_like(row) for row in ids])


def draws_tokens(sampling: Sampling) -> bool:
    """Whether generation draws random numbers, or sets PyTorch's random seed."""
    do_sample = sampling.extra.get("do_sample", bool(sampling.temperature))
    config: Any = sampling.extra.get("generation_config")
    return bool(do_sample or getattr(config, "do_sample", False)) or sampling.seed is not None


def _arguments(
    hf_model: PreTrainedModel, tokenizer: Any, sampling: Sampling, max_new_tokens: int
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": bool(sampling.temperature),
        "use_cache": True,
        "pad_token_id": _pad_token_id(hf_model, tokenizer),
        "stop_strings": None,  # The caller searches the answer for stop strings.
    }
    drawn = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    if sampling.temperature:
        arguments |= {name: value for name, value in drawn.items() if value is not None}
    else:  # Greedy decoding ignores these, even if the model's generation config sets them.
        arguments |= dict.fromkeys(drawn)
    configs = (sampling.extra.get("generation_config"), hf_model.generation_config)
    if all(getattr(config, "eos_token_id", None) is None for config in configs):
        arguments["eos_token_id"] = tokenizer.eos_token_id
    return arguments | sampling.extra


def stop_strings(hf_model: PreTrainedModel, sampling: Sampling) -> tuple[str, ...]:
    config: Any = sampling.extra.get("generation_config") or hf_model.generation_config
    given = config.stop_strings or hf_model.generation_config.stop_strings or ()
    return (*sampling.stop, *((given,) if isinstance(given, str) else given))


_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Options that enable speculative decoding."""


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
    """Whether batching is known to leave the answer to each prompt unchanged.

    False for options that are not in ``_BATCH_SAFE``, such as penalties, which count padding as
    text, and for sampling with a seed, because random numbers depend on the row.
    """
    given = {*hf_model.generation_config.to_diff_dict(), *sampling.extra}
    seeded = sampling.seed is not None and bool(sampling.temperature or sampling.extra)
    # End tokens must be plain ids. None and tensors are not known to be safe.
    plain = isinstance(sampling.extra.get("eos_token_id", ()), (int, list, tuple))
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
    """Cut a row after its first end token, because rows that end early are padded."""
    return ids[: len(until_end(ids, ends)) + 1]
