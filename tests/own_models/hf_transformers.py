"""Models of ``transformers``, made from their configurations: no weights, no network.

Each is as small as its configuration allows and trains in bfloat16, as `from_config` gives it.
"""

import cpu_torchvision  # noqa: F401  # before transformers
import torch
import transformers

TOKENS = (2, 32)


def causal(config, **given):
    """A language model, and what its trainer calls it with."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.randint(config.vocab_size, TOKENS)
    return model.train(), {"input_ids": ids, "use_cache": False, **given}


def llama():
    return causal(transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    ))  # fmt: skip


def llama_tied():
    return causal(transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    ))  # fmt: skip


def llama_with_labels():
    """As Trainer calls it: the model returns its own loss, prompts do not count."""
    model, given = llama()
    labels = given["input_ids"].clone()
    labels[:, :8] = -100
    return model, {**given, "labels": labels}


def llama_eager_attention():
    """Attention written out, with transformers' own additive mask."""
    model, given = llama()
    model.set_attn_implementation("eager")
    return model, given


def llama_padded():
    """The same with a batch that is padded on the right."""
    model, given = llama()
    mask = (torch.arange(TOKENS[1]) < torch.tensor([[32], [19]])).long()
    return model, {**given, "attention_mask": mask}


def llama_recomputed():
    """It recomputes its own layers: gradient_checkpointing_enable, as Trainer's option does."""
    model, given = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, given


def llama_with_cache():
    """As it is by default: it returns its keys and values, too."""
    model, given = llama()
    return model, given["input_ids"]


def gpt2():
    """Its projections are Conv1D, transformers' own; the tied head is the only linear."""
    return causal(transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))  # fmt: skip


def gpt2_dropout():
    return causal(transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def qwen3():
    return causal(transformers.Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    ))  # fmt: skip


def mixtral():
    return causal(transformers.MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, output_router_logits=True,
    ))  # fmt: skip


def qwen3_moe():
    return causal(transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    ))  # fmt: skip


def gemma():
    return causal(transformers.GemmaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=16,
    ))  # fmt: skip


def gemma2():
    """It caps its scores and logits."""
    return causal(transformers.Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=8,
    ))  # fmt: skip


def gemma3():
    return causal(transformers.Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ))  # fmt: skip


def mamba():
    """Its scan is written out in PyTorch where there is no CUDA kernel."""
    return causal(transformers.MambaConfig(
        vocab_size=256, hidden_size=32, state_size=8, num_hidden_layers=2, expand=2,
    ))  # fmt: skip


def bert():
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM._from_config(config, dtype=torch.bfloat16)
    mask = (torch.arange(TOKENS[1]) < torch.tensor([[32], [21]])).long()
    ids = torch.randint(1, 300, TOKENS) * mask
    types = (torch.arange(TOKENS[1]) >= 12).long() * mask
    return model.train(), {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def t5():
    config = transformers.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2,
        num_heads=4, dropout_rate=0.0, feed_forward_proj="gated-gelu", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    given = {
        "input_ids": torch.randint(256, TOKENS),
        "decoder_input_ids": torch.randint(256, (2, 16)),
    }
    return model.train(), given


def vit():
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        image_size=16, patch_size=4, num_labels=32, hidden_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification._from_config(config)
    return model.train(), {"pixel_values": torch.randn(4, 3, 16, 16)}
