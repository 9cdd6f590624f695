"""Tiny models with random weights, written as their libraries write them."""

import json

import torch

WORDS = ["a", "red", "apple", "dog", "on", "the", "table"]


def save_vae(folder, **config):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        **{
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
            "latent_channels": 4,
            "layers_per_block": 1,
            **config,
        }
    )
    vae.save_pretrained(folder)
    return vae.eval()


def save_clip_tokenizer(folder):
    """Byte-level BPE of single characters and a few merges, in the two files that OpenAI published."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # of Latin-1; other bytes have letters beyond it
    letters = [chr(code) for code in (*printable, *range(256, 512 - len(printable)))]
    merges = [("r", "e"), ("re", "d</w>"), ("d", "o"), ("do", "g</w>")]
    vocabulary = letters + [letter + "</w>" for letter in letters] + ["".join(pair) for pair in merges]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n")
    return len(vocabulary)


def save_clip(folder, whole=False, projected=True, tokenizer=None, **config):
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(1)
    size = save_clip_tokenizer(tokenizer or folder)
    text = {
        "vocab_size": size, "hidden_size": 16, "intermediate_size": 32, "projection_dim": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 20, "bos_token_id": size - 2, "eos_token_id": size - 1,
        **config,
    }  # fmt: skip
    if whole:
        vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        # As in some published models, the size said of the projection is another than it has.
        model = CLIPModel(CLIPConfig(text_config=text, vision_config={**vision, "patch_size": 16}, projection_dim=10))
    else:
        kind = CLIPTextModelWithProjection if projected else CLIPTextModel
        model = kind(CLIPTextConfig(**text))
    for parameter in model.parameters():  # CLIP's own start is so small that captions look alike
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return model.eval()


def save_t5(folder, **config):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *((f"▁{word}", -2.0) for word in WORDS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0).save_pretrained(folder)
    torch.manual_seed(2)
    model = T5EncoderModel(
        T5Config(
            **{
                "vocab_size": len(pieces),
                "d_model": 16,
                "d_kv": 8,
                "d_ff": 32,
                "num_layers": 2,
                "num_heads": 2,
                **config,
            }
        )
    )
    model.save_pretrained(folder)
    return model.eval()


def save_t5gemma(folder):
    """The encoder alone, and the tokenizer with its padding on the left, as in a PRX."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import GemmaTokenizerFast, T5GemmaModuleConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    pieces = [
        *((word, 0.0) for word in ("<pad>", "<eos>", "<bos>", "<unk>", "▁")),
        *((f"▁{word}", -2.0) for word in WORDS),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    made = GemmaTokenizerFast(tokenizer_object=tokenizer, model_max_length=20, padding_side="left")
    made.save_pretrained(folder / "tokenizer")
    torch.manual_seed(4)
    sizes = {"vocab_size": len(made), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8}
    config = T5GemmaModuleConfig(**sizes, **heads, sliding_window=4)
    config.dropout_rate = 0.0
    model = T5GemmaEncoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "text_encoder")
    return model.eval()


def save_dinov2(folder, registers=False):
    from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14, "image_size": 28}
    if registers:
        model = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**sizes, num_register_tokens=2))
    else:
        model = Dinov2Model(Dinov2Config(**sizes))
    model.save_pretrained(folder)
    return model.eval()
