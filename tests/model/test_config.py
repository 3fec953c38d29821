import json
from pathlib import Path
from typing import Any

import pytest
from millrace_serve.model.checkpoint.export_quantised import QUANTIZATIONS
from millrace_serve.model.config import ModelConfig, ModelConfigError
from millrace_testing.checkpoint import CONFIG
from millrace_testing.int4 import QUANTIZATION as INT4
from millrace_testing.int4 import WEIGHTS as INT4_WEIGHTS

QUANTIZATION = QUANTIZATIONS["fp8"]
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
}
SPARSE = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}


def compressed(part: str, **changes: Any) -> dict[str, Any]:
    groups = {"group_0": {**GROUP, part: {**GROUP[part], **changes}}}
    return {"quantization_config": {**COMPRESSED, "config_groups": groups}}


def packed(activations: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**INT4_WEIGHTS, **changes}, "input_activations": activations}
    return {"quantization_config": {**INT4, "config_groups": {"group_0": group}}}


def test_published_layout() -> None:
    config = ModelConfig.parse({**CONFIG, "auto_map": {"AutoConfig": "x"}, "pretraining_tp": 1})
    assert config.kv_row_dim == 576 and config.qk_head_dim == 192 and config.num_kv_layers == 4
    assert config.rope_scaling is not None and config.rope_scaling.factor == 4 and config.rope_theta == 10000
    assert [config.is_moe(layer) for layer in range(4)] == [False, True, True, True]
    assert config.eos_token_ids == (CONFIG["eos_token_id"],) and not config.fp8_blocks


def test_transformers_layout_means_the_same() -> None:
    raw = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "rope_scaling")}
    rope = {**CONFIG["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000}
    assert ModelConfig.parse({**raw, "rope_parameters": rope}) == ModelConfig.parse(CONFIG)


def test_optional_values() -> None:
    config = ModelConfig.parse({**CONFIG, "q_lora_rank": None, "rope_scaling": None, "eos_token_id": [1, 7]})
    assert config.q_lora_rank is None and config.rope_scaling is None and config.eos_token_ids == (1, 7)
    assert ModelConfig.parse({**CONFIG, "quantization_config": QUANTIZATION}).fp8_blocks
    assert ModelConfig.parse({**CONFIG, "quantization_config": {**INT4, "transform_config": {}}}).int4_experts


def test_only_v32_is_sparse() -> None:
    sparse, dense = ModelConfig.parse({**CONFIG, **SPARSE}), ModelConfig.parse({**CONFIG, "index_topk": 2048})
    assert (sparse.index_topk, dense.index_topk) == (2048, 0)
    assert [sparse.index_row_bytes(dtype) for dtype in ("bfloat16", "float8_e4m3fn", "float32")] == [132, 132, 512]
    assert dense.index_row_bytes("bfloat16") == dense.index_row_bytes("float32") == 0


def test_int8_as_it_is_published() -> None:
    forms = (
        (QUANTIZATIONS["int8"], "int8"),
        ({"quant_method": "w8a8_int8"}, "int8"),
        (COMPRESSED, "int8"),
        (QUANTIZATIONS["int8-block"], "int8-block"),
        (QUANTIZATION, ""),
    )
    for quantization, form in forms:
        assert ModelConfig.parse({**CONFIG, "quantization_config": quantization}).int8 == form


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "llama", "deepseek_v3", "kimi_k2", "deepseek_v32"]),
        ({"model_type": "deepseek_v32"}, ["index_n_heads", "None"]),
        ({**SPARSE, "index_topk": 0}, ["index_topk=0"]),
        ({**SPARSE, "index_head_dim": 96}, ["index_head_dim=96", "power of 2"]),
        ({**SPARSE, "index_head_dim": 32}, ["index_head_dim=32", "qk_rope_head_dim=64"]),
        ({**SPARSE, "q_lora_rank": None}, ["index_topk", "q_lora_rank"]),
        ({**SPARSE, "indexer_rope_interleave": True}, ["indexer_rope_interleave=True"]),
        ({**SPARSE, "index_topk_freq": 4}, ["index_topk_freq=4"]),
        ({**SPARSE, "index_topk_pattern": "FSSF"}, ["index_topk_pattern='FSSF'"]),
        ({"model_type": "glm_moe_dsa"}, ["glm_moe_dsa", "sparse attention", "rotates in pairs"]),
        ({"model_type": "deepseek_v4"}, ["deepseek_v4", "compressed attention"]),
        ({"model_type": "kimi_k25"}, ["kimi_k25", "vision"]),
        ({"model_type": "kimi_linear"}, ["kimi_linear", "Kimi Delta Attention"]),
        ({"scoring_func": "softmax"}, ["scoring_func", "softmax"]),
        ({"topk_method": "greedy"}, ["topk_method", "greedy"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"rope_interleave": False}, ["rope_interleave", "False"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings", "True"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling.type", "linear"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, ["original_max_position_embeddings"]),
        ({"rope_scaling": 4}, ["rope_scaling", "4"]),
        ({"model_type": ["deepseek_v3"]}, ["model_type=['deepseek_v3']"]),
        ({"quantization_config": "fp8"}, ["quantization_config='fp8' is not an object"]),
        ({"quantization_config": {"quant_method": ["fp8"]}}, ["quant_method=\"['fp8']\""]),
        ({"quantization_config": {**COMPRESSED, "format": {}}}, ["format='{}'"]),
        ({"quantization_config": {**COMPRESSED, "config_groups": ["a"]}}, ["config_groups=['a'] is not an object"]),
        ({"quantization_config": {**COMPRESSED, "config_groups": {"a": 1}}}, ["config_groups.a=1 is not an object"]),
        (
            {"quantization_config": {**COMPRESSED, "config_groups": {"a": {"weights": 4}}}},
            ["config_groups.a.weights=4 is not an object"],
        ),
        ({"quantization_config": {**QUANTIZATION, "quant_method": "awq"}}, ["quantization_config.quant_method", "awq"]),
        ({"quantization_config": {**QUANTIZATION, "weight_block_size": [1, 128]}}, ["weight_block_size", "[1, 128]"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["weight_block_size", "None"]),
        ({"quantization_config": {"quant_method": "blockwise_int8"}}, ["weight_block_size", "None"]),
        (
            {"quantization_config": {**COMPRESSED, "format": "marlin-24"}},
            ["format", "marlin-24", "int-quant", "pack-quant"],
        ),
        (packed(num_bits=8), ["group_0.weights.num_bits", "8"]),
        (packed(symmetric=False), ["group_0.weights.symmetric", "False"]),
        (packed(group_size=128), ["group_0.weights.group_size", "128"]),
        (packed(actorder="static"), ["group_0.weights.actorder", "static"]),
        (packed(strategy="channel"), ["group_0.weights.strategy", "channel"]),
        (packed({"num_bits": 8}), ["group_0.input_activations", "num_bits"]),
        ({"quantization_config": {**COMPRESSED, "transform_config": {"R1": {}}}}, ["transform_config", "R1"]),
        (
            {"quantization_config": {**COMPRESSED, "config_groups": {"a": {**GROUP, "output_activations": GROUP}}}},
            ["config_groups.a.output_activations", "num_bits"],
        ),
        ({"quantization_config": {**COMPRESSED, "config_groups": {}}}, ["config_groups", "0 groups"]),
        (compressed("weights", num_bits=4), ["group_0.weights.num_bits", "4"]),
        (compressed("weights", strategy="group"), ["group_0.weights.strategy", "group"]),
        (compressed("input_activations", dynamic=False), ["group_0.input_activations.dynamic", "False"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers", "2"]),
        ({"n_group": 5}, ["n_routed_experts=16", "n_group=5"]),
        ({"n_group": 16}, ["n_group=16"]),
        ({"topk_group": 5}, ["topk_group=5", "n_group=4"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok=9", "topk_group=2"]),
    ],
)
def test_refusals_name_key_and_value(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelConfigError) as error:
        ModelConfig.parse({**CONFIG, **change}, "there/config.json")
    assert all(word in str(error.value) for word in ["there/config.json", *words]), str(error.value)


def test_required_key_is_named() -> None:
    raw = {key: value for key, value in CONFIG.items() if key != "kv_lora_rank"}
    with pytest.raises(ModelConfigError, match="kv_lora_rank"):
        ModelConfig.parse(raw)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff\xfe"])
def test_unreadable_files(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(("quantization", "said"), [({"quant_algo": "NVFP4"}, "'NVFP4'"), ({}, "None"), ("x", "None")])
def test_weights_of_modelopt_are_refused(quantization: object, said: str, tmp_path: Path) -> None:
    """nvidia/DeepSeek-V3.1-NVFP4: config.json says nothing of it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(ModelConfigError, match=rf"hf_quant_config.json: quant_algo={said} is not supported"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        (None, (1,)),
        ({}, (1,)),
        ({"eos_token_id": 1}, (1,)),
        ({"eos_token_id": 7}, (1, 7)),
        ({"eos_token_id": [7, 1]}, (1, 7)),
    ],
)
def test_load(generation: dict[str, Any] | None, ends: tuple[int, ...], tmp_path: Path) -> None:
    """Kimi K2's config.json names the end of a text alone, its generation_config.json the end of a turn."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 1}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.load(tmp_path) == ModelConfig.parse({**CONFIG, "eos_token_id": list(ends)})


@pytest.mark.parametrize("generation", [None, {"eos_token_id": 1}, {"eos_token_id": 6}])
def test_end_of_a_turn_is_found_by_its_name(generation: dict[str, Any] | None, tmp_path: Path) -> None:
    """Also where generation_config.json is absent, as trainers leave folders, or names the end of a text alone."""
    added = {"1": "[EOS]", "6": "<|im_end|>", "7": "<|im_user|>"}
    decoder = {token: {"content": content, "special": True} for token, content in added.items()}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 1}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.load(tmp_path).eos_token_ids == (1, 6)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("eos", "why"),
    [
        ("<|im_end|>", "is neither a token's id"),
        ([1, None], "is neither a token's id"),
        (-1, "is neither a token's id"),
        (True, "is neither a token's id"),
        ([1, CONFIG["vocab_size"]], f"must be below vocab_size={CONFIG['vocab_size']}$"),
    ],
)
def test_ends_that_are_no_tokens(eos: object, why: str, file: str, tmp_path: Path) -> None:
    files = {"config.json": CONFIG, "generation_config.json": {}}
    for name, raw in files.items():
        (tmp_path / name).write_text(json.dumps({**raw, "eos_token_id": eos} if name == file else raw))
    with pytest.raises(ModelConfigError, match=rf"/{file}: eos_token_id=.* {why}"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("generation_config.json", "{", "not JSON"),
        ("generation_config.json", "[1]", "expected an object, found list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": ["a"]}', "added_tokens_decoder has no content"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"6": {}}}', "added_tokens_decoder has no content"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": {"content": "<|im_end|>"}}}', "added_tokens_decoder"),
    ],
)
def test_files_beside_the_configuration_that_are_malformed(file: str, text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_text(text)
    with pytest.raises(ModelConfigError, match=rf"/{file}: {why}") as error:
        ModelConfig.load(tmp_path)
    assert "\n" not in str(error.value)
