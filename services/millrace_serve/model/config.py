"""The published `config.json` of a DeepSeek-V3-architecture checkpoint, checked once: V3, R1, V3.1, V3.2, Moonlight,
Kimi K2.

Keys that only training or another runtime reads are ignored. A value that would change the result and that this model
does not implement is refused by name.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from millrace_common import tokenizer_file
from millrace_common.json_values import Json, JsonObject
from millrace_common.model_files import read_object
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"  # of transformers, may be missing; Kimi K2's alone names the end of a turn
END_OF_TURN = "<|im_end|>"  # of Moonshot's models; DeepSeek's turns end like a text, with the `eos_token_id`
MODELOPT_FILE = "hf_quant_config.json"  # says how weights are quantised when config.json does not

SUPPORTED: dict[str, tuple[Json, ...]] = {
    "model_type": ("deepseek_v3", "kimi_k2", "deepseek_v32"),
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
    "rope_interleave": (True, None),
    "ep_size": (1,),
    "tie_word_embeddings": (False,),
    "indexer_rope_interleave": (False, None),
    "index_topk_freq": (1, None),  # above 1 and with a pattern several layers share the chosen tokens
    "index_topk_pattern": (None,),
}

# Methods of `quantization_config`: what it must say, and the fields of ModelConfig that follow.
BLOCKS = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUANTISATIONS: dict[str, tuple[JsonObject, JsonObject]] = {
    "fp8": ({"fmt": "e4m3", **BLOCKS}, {"fp8_blocks": True}),
    "blockwise_int8": (BLOCKS, {"int8": "int8-block"}),
    "w8a8_int8": ({"activation_scheme": "dynamic"}, {"int8": "int8"}),
}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
# The same by `format` for the method compressed-tensors: what its one group of layers must say. A part of PARTS that is
# not listed must be absent.
PARTS = ("weights", "input_activations", "output_activations")
COMPRESSED: dict[str, tuple[dict[str, JsonObject], JsonObject]] = {
    "int-quantized": (
        {
            "weights": {**INT8, "strategy": "channel"},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        },
        {"int8": "int8"},
    ),
    "pack-quantized": ({"weights": INT4}, {"int4_experts": True}),
}
USUAL = ("fmt", "activation_scheme")  # keys that may be left out

# Relatives of V3, and what a forward pass of theirs needs that this model does not have.
ABSENT = {
    "deepseek_v2": "gates with softmax scores and greedy choice",
    "glm_moe_dsa": "sparse attention whose indexer rotates in pairs and whose choice several layers may share",
    "deepseek_v4": "compressed attention, hyper-connections and FP4 experts",
    "kimi_k25": "a vision tower",
    "kimi_linear": "Kimi Delta Attention",
}
INDEXER = ("index_n_heads", "index_head_dim", "index_topk")  # keys of V3.2's sparse attention


class ModelConfigError(ValueError):
    """config.json is missing, malformed, or asks for something that is not supported."""


class RopeScaling(BaseModel):
    """YaRN, arXiv:2309.00071."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    factor: float = Field(ge=1)
    original_max_position_embeddings: int = Field(gt=0)
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1  # of the rotary tables
    mscale_all_dim: float = 0  # of the softmax scale; 0 leaves it alone


class ModelConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_nextn_predict_layers: int = Field(default=0, ge=0, le=1)
    max_position_embeddings: int = Field(gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    # MLA
    num_attention_heads: int = Field(gt=0)
    q_lora_rank: int | None = None  # None: q_proj directly from the hidden state
    kv_lora_rank: int = Field(gt=0)
    qk_nope_head_dim: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0, multiple_of=2)
    v_head_dim: int = Field(gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None

    # Sparse attention (V3.2): all 0 in models whose attention is dense
    index_n_heads: int = Field(default=0, ge=0)
    index_head_dim: int = Field(default=0, ge=0)
    index_topk: int = Field(default=0, ge=0)  # cached tokens that a token attends to

    # MoE
    first_k_dense_replace: int = Field(ge=0)
    intermediate_size: int = Field(gt=0)
    moe_intermediate_size: int = Field(gt=0)
    n_routed_experts: int = Field(gt=0)
    n_shared_experts: int = Field(ge=0)
    num_experts_per_tok: int = Field(gt=0)
    n_group: int = Field(gt=0)
    topk_group: int = Field(gt=0)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    fp8_blocks: bool = False  # linear weights are E4M3 with one weight_scale_inv per 128 x 128 block
    int8: Literal["", "int8", "int8-block"] = ""  # they are INT8, with a weight_scale per output channel or with blocks
    int4_experts: bool = False  # routed experts are INT4 in groups of 32 columns, other linear weights are plain

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """An answer ends at every token that one of the folder's files names as an end. Raises ModelConfigError,
        which names the file.
        """
        path, modelopt = Path(directory) / CONFIG_FILE, Path(directory) / MODELOPT_FILE
        if modelopt.exists():
            quantization = _read(modelopt).get("quantization")
            method = quantization.get("quant_algo") if isinstance(quantization, dict) else None
            raise ModelConfigError(
                f"{modelopt}: quant_algo={method!r} is not supported: weights of ModelOpt cannot be read"
            )
        config = cls.parse(_read(path), str(path))
        ends = list(config.eos_token_ids)
        for file, named in ((GENERATION_FILE, _eos), (tokenizer_file.CONFIG, _end_of_turn)):
            if (path := Path(directory) / file).exists():
                ends += named(_read(path), str(path), config.vocab_size)
        return config.model_copy(update={"eos_token_ids": tuple(dict.fromkeys(ends))})

    @classmethod
    def parse(cls, raw: JsonObject, source: str = CONFIG_FILE) -> Self:
        """`raw` in the published layout, or in the layout that transformers 5 writes (`rope_parameters`)."""
        try:
            if (absent := ABSENT.get(str(raw.get("model_type")))) is not None:
                raise ValueError(f"model_type={raw['model_type']!r} is not supported: it needs {absent}")
            for key, values in SUPPORTED.items():
                if key in raw and raw[key] not in values:
                    raise _unknown(key, raw[key], values)
            config = cls.model_validate({**raw, **_rope(raw), **_quantization(raw), **_indexer(raw)})
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" if e["loc"] else e["msg"]
                for e in error.errors()
            ]
            raise ModelConfigError(f"{source}: {'; '.join(lines)}") from None
        except ValueError as error:
            raise ModelConfigError(f"{source}: {error}") from None
        return config.model_copy(update={"eos_token_ids": _eos(raw, source, config.vocab_size)})

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups or experts // groups < 2:
            raise ValueError(
                f"n_routed_experts={experts} must be a multiple of n_group={groups} with two or more per group"
            )
        if self.topk_group > groups:
            raise ValueError(f"topk_group={self.topk_group} exceeds n_group={groups}")
        if (chosen := self.num_experts_per_tok) > (reach := self.topk_group * (experts // groups)):
            text = f"exceeds the {reach} experts of topk_group={self.topk_group} groups"
            raise ValueError(f"num_experts_per_tok={chosen} {text}")
        return self

    @model_validator(mode="after")
    def _check_indexer(self) -> Self:
        if self.index_topk:
            if self.q_lora_rank is None:
                raise ValueError("index_topk needs q_lora_rank: the indexer's queries are made of the query latent")
            width, least = self.index_head_dim, self.qk_rope_head_dim
            if not least <= width <= 128 or width & (width - 1):
                raise ValueError(f"index_head_dim={width} must be a power of 2 from qk_rope_head_dim={least} to 128")
        return self

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_row_dim(self) -> int:
        """Width of one token's row in the KV pool: latent, then rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def index_row_bytes(self, kv_dtype: str) -> int:
        """Bytes of one token's index key in a layer of a KV pool of that dtype; 0 where attention is dense. E4M3 with
        one float32 scale, but float32 in a float32 pool.
        """
        return 4 * self.index_head_dim if kv_dtype == "float32" else self.index_head_dim + 4 * bool(self.index_topk)

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pool: the MTP layer is the last."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def without_mtp(self) -> Self:
        """The same model, whose MTP layer is neither loaded nor in the pool."""
        return self.model_copy(update={"num_nextn_predict_layers": 0})

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


def _read(path: Path) -> JsonObject:
    try:
        return read_object(path)
    except ValueError as error:
        raise ModelConfigError(str(error)) from None


def _indexer(raw: JsonObject) -> JsonObject:
    """All keys of V3.2, which must be there; other models ignore them."""
    if raw.get("model_type") != "deepseek_v32":
        return dict.fromkeys(INDEXER, 0)
    for key in INDEXER:
        if not raw.get(key):
            raise ValueError(f"{key}={raw.get(key)!r} is not supported (supported: 1 or more)")
    return {}


def _rope(raw: JsonObject) -> JsonObject:
    """Both spellings: `rope_theta` + `rope_scaling` as published, `rope_parameters` holding both in transformers 5."""
    merged = _object(raw.get("rope_parameters") or raw.get("rope_scaling") or {}, "rope_scaling")
    kind = merged.get("rope_type", merged.get("type", "default"))
    values: JsonObject = {"rope_theta": merged.get("rope_theta", raw.get("rope_theta", 10000.0)), "rope_scaling": None}
    if kind == "yarn":
        for key in ("attention_factor", "truncate"):
            if merged.get(key) not in (None, True):
                raise ValueError(f"rope_scaling.{key}={merged[key]!r} is not supported")
        values["rope_scaling"] = {key: value for key, value in merged.items() if value is not None}
    elif kind != "default":
        raise ValueError(f"rope_scaling.type={kind!r} is not supported (supported: 'yarn')")
    return values


def _quantization(raw: JsonObject) -> JsonObject:
    quant, where = raw.get("quantization_config"), "quantization_config"
    if quant is None:
        return {"fp8_blocks": False, "int8": "", "int4_experts": False}
    method = str(_object(quant, where).get("quant_method"))
    if method == "compressed-tensors":
        return _compressed(quant, where)
    if method not in QUANTISATIONS:
        raise _unknown(f"{where}.quant_method", method, (*QUANTISATIONS, "compressed-tensors"))
    wanted, fields = QUANTISATIONS[method]
    _require(quant, wanted, where)
    return fields


def _compressed(quant: JsonObject, where: str) -> JsonObject:
    if (kind := str(quant.get("format"))) not in COMPRESSED:
        raise _unknown(f"{where}.format", kind, COMPRESSED)
    schemes, fields = COMPRESSED[kind]
    if transform := quant.get("transform_config"):
        raise ValueError(f"{where}.transform_config={transform!r} is not supported (supported: none)")
    groups = _object(quant.get("config_groups") or {}, f"{where}.config_groups")
    if len(groups) != 1:
        raise ValueError(f"{where}.config_groups: {len(groups)} groups are not supported (supported: one)")
    for name, group in groups.items():
        of_group = f"{where}.config_groups.{name}"
        for part in PARTS:
            found = _object(group, of_group).get(part)
            if part in schemes:
                _require(_object(found or {}, f"{of_group}.{part}"), schemes[part], f"{of_group}.{part}")
            else:
                _require(group, {part: None}, of_group)
    return fields


def _object(value: Json, where: str) -> JsonObject:
    if not isinstance(value, dict):
        raise ValueError(f"{where}={value!r} is not an object")
    return value


def _unknown(field: str, value: object, supported: Iterable[str]) -> ValueError:
    return ValueError(f"{field}={value!r} is not supported (supported: {', '.join(map(repr, supported))})")


def _require(found: JsonObject, wanted: JsonObject, where: str) -> None:
    for key, value in wanted.items():
        if found.get(key, value if key in USUAL else None) != value:
            raise ValueError(f"{where}.{key}={found.get(key)!r} is not supported (supported: {value!r})")


def _eos(raw: JsonObject, source: str, vocab_size: int) -> tuple[int, ...]:
    eos = raw.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelConfigError(f"{source}: eos_token_id={eos!r} is neither a token's id nor a list of such")
    if max(ids, default=0) >= vocab_size:
        raise ModelConfigError(f"{source}: eos_token_id={eos!r} must be below vocab_size={vocab_size}")
    return tuple(ids)


def _end_of_turn(raw: JsonObject, source: str, vocab_size: int) -> tuple[int, ...]:
    """The end of a turn by its name, for folders whose generation_config.json is absent or names the end of a text
    alone: trainers and quantisers leave that file out, and without this end an answer goes on until its tokens are used
    up. The name has no other meaning in these vocabularies, and a model without chat never says it.
    """
    added = raw.get("added_tokens_decoder") or {}
    try:
        ids = [int(token) for token, facts in added.items() if facts["content"] == END_OF_TURN]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelConfigError(f"{source}: added_tokens_decoder has no content for each token's id") from None
    return _eos({"eos_token_id": ids}, source, vocab_size)
