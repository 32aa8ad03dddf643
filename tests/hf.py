"""Models of ``transformers``, tiny and as the library makes them, with real data; cases for ``trained``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import AdamW

from gpt import stdlib_bytes
from models import Batch, Case
from trained import in_float64

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class _Library:
    """``transformers``, which takes seconds to import, when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        import transformers

        return getattr(transformers, name)


T = _Library()
LENGTH = 12  # tokens of a text
ANSWER = 7  # tokens of what a sequence-to-sequence model answers
PAD, BEGIN, END = 0, 1, 2
SPECIAL = 3  # tokens that are no bytes
VOCABULARY = 256 + SPECIAL
IGNORED = -100  # a label that does not count

# the settings of most models that continue texts
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END,
}  # fmt: skip
# … and of those that fill gaps
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": PAD,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
IMAGE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10,
}  # fmt: skip


# data


def _texts(sizes: Sequence[int], length: int, first: int = 0) -> list[Tensor]:
    """Batches of these sizes of the standard library's source, as tokens int64[n, length]."""
    tokens = stdlib_bytes().long() + SPECIAL
    rows = tokens[first : first + sum(sizes) * length].view(-1, length)
    return list(rows.split(list(sizes)))


def continued(sizes: Sequence[int]) -> list[Batch]:
    """(input_ids, labels): texts to continue, of which the first tokens do not count."""
    batches: list[Batch] = []
    for tokens in _texts(sizes, LENGTH):
        labels = tokens.clone()
        labels[:, :2] = IGNORED
        batches.append((tokens, labels))
    return batches


def padded(sizes: Sequence[int]) -> list[Batch]:
    """(input_ids, attention_mask, labels): texts of different lengths, of which every third token is to be found."""
    batches: list[Batch] = []
    for tokens in _texts(sizes, LENGTH):
        lengths = LENGTH - torch.arange(len(tokens)) % 4
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        asked = (torch.arange(LENGTH) % 3 == 1) & (mask == 1)
        batches.append((tokens * mask, mask, torch.where(asked, tokens, IGNORED)))
    return batches


def answered(sizes: Sequence[int]) -> list[Batch]:
    """(input_ids, attention_mask, labels): texts, and other texts of different lengths to answer with."""
    batches: list[Batch] = []
    for (tokens, mask, _), answer in zip(padded(sizes), _texts(sizes, ANSWER, first=1 << 16), strict=True):
        lengths = ANSWER - torch.arange(len(tokens)) % 3
        batches.append((tokens, mask, torch.where(torch.arange(ANSWER) < lengths[:, None], answer, IGNORED)))
    return batches


def digits(sizes: Sequence[int], *, channels: int = 1, larger: int = 1) -> list[Batch]:
    """(pixel_values, labels): scikit-learn's digits, float32[n, channels, 8·larger, 8·larger] in 0 … 1."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    images = images.repeat(1, channels, 1, 1).repeat_interleave(larger, 2).repeat_interleave(larger, 3)
    total = sum(sizes)
    return list(
        zip(images[:total].split(list(sizes)), torch.tensor(found.target[:total]).split(list(sizes)), strict=True)
    )


def captioned(sizes: Sequence[int]) -> list[Batch]:
    """(input_ids, attention_mask, pixel_values): a text for each image."""
    images = digits(sizes, channels=3)
    return [(tokens, mask, pixels) for (tokens, mask, _), (pixels, _) in zip(padded(sizes), images, strict=True)]


def spoken(sizes: Sequence[int]) -> list[Batch]:
    """(input_features, labels): a strip of digits as if it were a spectrogram, float32[n, 8, 32], and a text."""
    images = torch.cat([image for image, _ in digits([4 * sum(sizes)])])
    strips = images.view(-1, 4, 8, 8).permute(0, 2, 1, 3).reshape(-1, 8, 32).split(list(sizes))
    return [(strip, labels) for strip, (_, _, labels) in zip(strips, answered(sizes), strict=True)]


# cases


def case(
    model: str,
    config: Callable[[float], PretrainedConfig],
    batches: Callable[[Sequence[int]], list[Batch]],
    names: str,
    stages: tuple[str, str] = ("", ""),
    **given: Any,
) -> Callable[[float], Case]:
    """Dropout → the case of the model of this name, whose ``forward`` takes tensors and keywords and finds the loss."""
    keys = tuple(names.split())

    def loss(net: nn.Module, *tensors: Tensor) -> Tensor:
        found: Tensor = net(**dict(zip(keys, tensors, strict=True)), **given).loss
        return found

    def of(dropout: float = 0.0) -> Case:
        return Case(
            lambda: getattr(T, model)(config(dropout)).train(), lambda m: AdamW(m.parameters(), lr=1e-3), batches,
            stages, loss=loss, names=keys,
        )  # fmt: skip

    return of


TEXT, MASKED, PIXELS = "input_ids labels", "input_ids attention_mask labels", "pixel_values labels"


def _gpt2(p: float) -> PretrainedConfig:
    return T.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=p, embd_pdrop=p,
        attn_pdrop=p, bos_token_id=BEGIN, eos_token_id=END,
    )  # fmt: skip


def _bert(p: float) -> PretrainedConfig:
    return T.BertConfig(**ENCODER, hidden_dropout_prob=p, attention_probs_dropout_prob=p)


def _t5(p: float) -> PretrainedConfig:
    return T.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=p,
        decoder_start_token_id=PAD,
    )  # fmt: skip


def _vit(p: float) -> PretrainedConfig:
    return T.ViTConfig(**IMAGE, hidden_dropout_prob=p, attention_probs_dropout_prob=p)


HALVES = (r"model\.(embed_tokens|rotary_emb|layers\.0)", r"model\.(layers\.1|norm)|lm_head")
# the models that the project has promised
PROMISED: dict[str, Callable[[float], Case]] = {
    "gpt2": case(
        "GPT2LMHeadModel", _gpt2, continued, TEXT,
        (r"transformer\.(wte|wpe|drop|h\.0)", r"transformer\.(h\.1|ln_f)|lm_head"),
    ),
    "bert": case(
        "BertForMaskedLM", _bert, padded, MASKED,
        (r"bert\.(embeddings|encoder\.layer\.0)", r"bert\.encoder\.layer\.1|cls"),
    ),
    "llama": case(
        "LlamaForCausalLM", lambda p: T.LlamaConfig(**DECODER, attention_dropout=p), continued, TEXT, HALVES
    ),
    "t5": case("T5ForConditionalGeneration", _t5, answered, MASKED, ("shared|encoder", "decoder|lm_head")),
    "vit": case(
        "ViTForImageClassification", _vit, digits, PIXELS,
        (r"vit\.(embeddings|layers\.0)", r"vit\.(layers\.1|layernorm)|classifier"),
    ),
    "mixtral": case(
        "MixtralForCausalLM",
        lambda p: T.MixtralConfig(**DECODER, **EXPERTS, num_local_experts=4, attention_dropout=p),
        continued, TEXT, HALVES,
    ),
}  # fmt: skip

# further architectures, each for a mechanism of its own
MLA = {
    **DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
SPEECH = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": PAD,
    "bos_token_id": BEGIN, "eos_token_id": END, "decoder_start_token_id": END,
}  # fmt: skip


def _deberta(p: float) -> PretrainedConfig:
    return T.DebertaV2Config(
        **ENCODER, hidden_dropout_prob=p, attention_probs_dropout_prob=p, relative_attention=True,
        pos_att_type=["p2c", "c2p"], position_buckets=8,
    )  # fmt: skip


def _distilbert(p: float) -> PretrainedConfig:
    return T.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=32, dropout=p,
        attention_dropout=p, pad_token_id=PAD,
    )  # fmt: skip


def _opt(p: float) -> PretrainedConfig:
    return T.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, ffn_dim=48, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32, dropout=p, pad_token_id=PAD, bos_token_id=BEGIN,
        eos_token_id=END,
    )  # fmt: skip


def _neox(p: float) -> PretrainedConfig:
    settings = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "pad_token_id")}
    return T.GPTNeoXConfig(**settings, hidden_dropout=p, attention_dropout=p)


def _falcon(p: float) -> PretrainedConfig:
    settings = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "intermediate_size")}
    return T.FalconConfig(**settings, hidden_dropout=p, attention_dropout=p)


def _bloom(p: float) -> PretrainedConfig:
    return T.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=p, attention_dropout=p,
        bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip


def _mamba(_: float) -> PretrainedConfig:
    return T.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=1, pad_token_id=PAD,
        bos_token_id=BEGIN, eos_token_id=END,
    )  # fmt: skip


def _swin(p: float) -> PretrainedConfig:
    return T.SwinConfig(
        image_size=16, patch_size=2, num_channels=1, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4,
        num_labels=10, hidden_dropout_prob=p, attention_probs_dropout_prob=p, drop_path_rate=p,
    )  # fmt: skip


def _clip(p: float) -> PretrainedConfig:
    text = {**ENCODER, "attention_dropout": p, "bos_token_id": BEGIN, "eos_token_id": END}
    image = {k: v for k, v in {**IMAGE, "num_channels": 3, "patch_size": 4}.items() if k != "num_labels"}
    return T.CLIPConfig(text_config=text, vision_config={**image, "attention_dropout": p}, projection_dim=16)


def larger_digits(sizes: Sequence[int]) -> list[Batch]:
    """As ``digits``, 16 pixels wide."""
    return digits(sizes, larger=2)


FURTHER: dict[str, Callable[[float], Case]] = {
    "mistral": case(
        "MistralForCausalLM", lambda p: T.MistralConfig(**DECODER, attention_dropout=p, sliding_window=8), padded,
        MASKED, HALVES,
    ),
    "qwen2": case("Qwen2ForCausalLM", lambda p: T.Qwen2Config(**DECODER, attention_dropout=p), continued, TEXT, HALVES),
    "qwen3": case(
        "Qwen3ForCausalLM", lambda p: T.Qwen3Config(**DECODER, attention_dropout=p, head_dim=8), padded, MASKED, HALVES
    ),
    "qwen3-moe": case(
        "Qwen3MoeForCausalLM",
        lambda p: T.Qwen3MoeConfig(
            **DECODER, **EXPERTS, attention_dropout=p, head_dim=8, num_experts=4, moe_intermediate_size=24
        ),
        continued, TEXT, HALVES,
    ),
    "gemma2": case(
        "Gemma2ForCausalLM",
        lambda p: T.Gemma2Config(**DECODER, attention_dropout=p, head_dim=8, sliding_window=8), continued, TEXT, HALVES,
    ),
    "gemma3": case(
        "Gemma3ForCausalLM",
        lambda p: T.Gemma3TextConfig(**DECODER, attention_dropout=p, head_dim=8, sliding_window=8),
        continued, TEXT, HALVES,
    ),
    "opt": case("OPTForCausalLM", _opt, padded, MASKED),
    "gpt-neox": case("GPTNeoXForCausalLM", _neox, continued, TEXT),
    "phi3": case(
        "Phi3ForCausalLM", lambda p: T.Phi3Config(**DECODER, attention_dropout=p, resid_pdrop=p, embd_pdrop=p),
        continued, TEXT, HALVES,
    ),
    "deberta-v2": case("DebertaV2ForMaskedLM", _deberta, padded, MASKED),
    "roberta": case(
        "RobertaForMaskedLM",
        lambda p: T.RobertaConfig(**ENCODER, hidden_dropout_prob=p, attention_probs_dropout_prob=p), padded, MASKED,
    ),
    "distilbert": case("DistilBertForMaskedLM", _distilbert, padded, MASKED),
    "electra": case(
        "ElectraForMaskedLM",
        lambda p: T.ElectraConfig(**ENCODER, embedding_size=16, hidden_dropout_prob=p, attention_probs_dropout_prob=p),
        padded, MASKED,
    ),
    "bart": case(
        "BartForConditionalGeneration",
        lambda p: T.BartConfig(**SPEECH, max_position_embeddings=32, dropout=p, forced_eos_token_id=END),
        answered, MASKED,
    ),
    "whisper": case(
        "WhisperForConditionalGeneration",
        lambda p: T.WhisperConfig(
            **SPEECH, num_mel_bins=8, max_source_positions=16, max_target_positions=16, dropout=p
        ),
        spoken, "input_features labels",
    ),
    "swin": case("SwinForImageClassification", _swin, larger_digits, PIXELS),
    "convnext": case(
        "ConvNextForImageClassification",
        lambda p: T.ConvNextConfig(
            num_channels=1, patch_size=2, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=10,
            drop_path_rate=p,
        ),
        larger_digits, PIXELS,
    ),
    "clip": case(
        "CLIPModel", _clip, captioned, "input_ids attention_mask pixel_values", return_loss=True
    ),
    "mamba": case("MambaForCausalLM", _mamba, continued, TEXT),
    "falcon": case("FalconForCausalLM", _falcon, continued, TEXT),
    "bloom": case("BloomForCausalLM", _bloom, continued, TEXT),
    "deepseek-v2": case(
        "DeepseekV2ForCausalLM", lambda p: T.DeepseekV2Config(**MLA, attention_dropout=p), continued, TEXT, HALVES
    ),
    "deepseek-v3": case(
        "DeepseekV3ForCausalLM", lambda p: T.DeepseekV3Config(**MLA, attention_dropout=p), continued, TEXT, HALVES
    ),
    "gpt-oss": case(
        "GptOssForCausalLM",
        lambda p: T.GptOssConfig(
            **DECODER, **EXPERTS, attention_dropout=p, head_dim=8, num_local_experts=4, sliding_window=8,
            attention_bias=False,
        ),
        continued, TEXT, HALVES,
    ),
}  # fmt: skip

# asks whether any token of the batch attends to all others
LOOKS_AT_VALUES = case(
    "LongformerForMaskedLM", lambda p: T.LongformerConfig(**ENCODER, attention_window=4), padded, MASKED
)

# models with experts, whose grouped product torch has for float32 and narrower only
NOT_FLOAT64 = frozenset({"mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3", "gpt-oss"})


def exact(name: str, case: Case) -> tuple[Case, float]:
    """The same in float64 where torch can, and how far ``differences`` may go."""
    if name in NOT_FLOAT64:
        return case, 1e-4
    return in_float64(case), 1e-5  # many norms are in float32 all the same
