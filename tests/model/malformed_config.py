"""Malformed configs: (changes to a good config.json, what the message must say), `...` removing a field."""

from typing import Any

CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ...}, "architectures is missing"),
    ({"architectures": []}, "architectures is"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is"),
    ({"architectures": [3]}, "architectures is"),
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"text_config": 1}, "text_config is 1"),
    ({"text_config": {"hidden_size": -1}}, "hidden_size is -1"),
    *(
        ({field: value}, f"{field} is")
        for field in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings",
        )
        for value in (..., None, 0, -1, 1 << 40, 2.0, "256", True, [256])
    ),
    *(({"num_key_value_heads": value}, "num_key_value_heads") for value in (0, 3, 8, -1, "2", 2.5, True)),
    *(({"head_dim": value}, "head_dim") for value in (0, -64, 1, 1 << 20, "64", 64.0, [])),
    ({"head_dim": 63}, "heads of 63"),
    ({"head_dim": ..., "num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads is 3"),
    *(({"rms_norm_eps": value}, "rms_norm_eps") for value in (..., 0, -1e-5, 2, "1e-5", [], True)),
    *(({"rope_theta": value}, "rope_theta") for value in (0, -1, "10000", 1e30, [], True)),
    *(({"rope_scaling": value}, "rope_scaling") for value in (8, [], {"type": "magic"}, {"type": "linear"})),
    *(({"hidden_act": value}, "hidden_act") for value in ("relu", 3, [], True)),
    *(({"tie_word_embeddings": value}, "tie_word_embeddings") for value in ("yes", 1, [])),
    *(({"eos_token_id": value}, "eos_token_id") for value in (-1, 1024, "2", 2.0, [1, "2"], [[1]], {}, True)),
    *(({"bos_token_id": value}, "bos_token_id") for value in (-2, 1024, "1", [1], True)),
    ({"pad_token_id": 1 << 33}, "pad_token_id"),
    *(({"sliding_window": value}, "sliding_window") for value in (0, -1, "16", 1.5, True)),
    ({"use_sliding_window": "no"}, "use_sliding_window"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ({"attn_logit_softcapping": "50"}, "attn_logit_softcapping"),
    ({"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
    ({"quantization_config": "exl2"}, "quantization_config is"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
    ({"quantization_config": {"quant_method": 3}}, "quant_method is 3"),
    ({"quantization_config": {"quant_method": "gptq", "checkpoint_format": "marlin"}}, "checkpoint_format is 'marlin'"),
    ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits is '4'"),
    ({"quantization_config": {"quant_method": "gptq", "group_size": 0.5}}, "group_size is 0.5"),
    ({"intermediate_size": 513}, "has shape"),
    ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj"),
    ({"vocab_size": 1025}, "has shape"),
    ({"hidden_size": 512}, "has shape"),
    ({"num_key_value_heads": 4}, "has shape"),
]  # fmt: skip

GENERATION: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_p": 1.1}, "top_p"),
    ({"min_p": [0]}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"do_sample": "no"}, "do_sample"),
    ({"eos_token_id": [1, 99999]}, "eos_token_id"),
]

BAD_JSON: list[tuple[str | bytes, str]] = [
    ("", "is not JSON"), ("{", "is not JSON"), ("[]", "not a JSON object"), ("7", "not a JSON object"),
    ('{"vocab_size": 1, "vocab_size": 2}', "there twice"), ('{"rope_theta": NaN}', "NaN"),
    ('{"rope_theta": Infinity}', "Infinity"), ('{"rope_theta": 1e400}', "too large"),
    ('{"a":' * 5000 + "1" + "}" * 5000, "nested"), (b"\xff\xfe{}", "UTF-8"), (b'{"a": "\x00"}', "is not JSON"),
    (b"PK\x03\x04 not a config", "is not JSON"), ('{"a": ' + "1" * 9999 + "}", "digits"),
]  # fmt: skip
