"""Write a Llama of two small layers with random weights."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
torch.manual_seed(462)
d, i, kv, v = 128, 192, 64, 256
shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
for n in range(2):
    at = f"model.layers.{n}."
    shapes |= {
        at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,),
        at + "self_attn.q_proj.weight": (d, d), at + "self_attn.k_proj.weight": (kv, d),
        at + "self_attn.v_proj.weight": (kv, d), at + "self_attn.o_proj.weight": (d, d),
        at + "mlp.gate_proj.weight": (i, d), at + "mlp.up_proj.weight": (i, d), at + "mlp.down_proj.weight": (d, i),
    }
made = {}
for name, shape in shapes.items():
    made[name] = (1 + 0.1 * torch.randn(shape) if len(shape) == 1 else 0.2 * torch.randn(shape)).bfloat16()
save_file(made, folder / "model.safetensors")
