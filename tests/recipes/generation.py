"""Models of transformers that generate between steps of training."""

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from recipes.data import tokens
from recipes.recipe import Refused, Training, recipe

KIND = "generation"
WORDS, NEW = 23, 4
FLOAT32 = 1e-6  # in which transformers computes norms of any model
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}


def generating(job, config, **options):
    """A language model that trains, and answers in a predict job."""
    model = AutoModelForCausalLM.from_config(config).to(torch.get_default_dtype())
    if "eos_token_id" not in options:  # nothing that is found ends an answer
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    @job
    def train_step(words, following):
        loss = F.cross_entropy(model(words).logits.flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @job(type="predict")
    def answer(words, mask):
        return model.generate(words, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)

    def run(words, following):
        model.train()
        loss = train_step(words, following)
        model.eval()
        mask = (torch.arange(words.shape[1]) >= torch.arange(len(words))[:, None] % 3).long()  # padded on the left
        return loss, answer(words, mask)

    return Training(model, optimizer, run, tokens(5, WORDS))


@recipe(KIND, "Llama generates greedily", within=FLOAT32)
def llama(job):
    """Greedy model.generate of new tokens with no end token, a cache that grows, prompts padded on the left."""
    return generating(job, LlamaConfig(**LLAMA))


@recipe(KIND, "Llama generates with a static cache", within=FLOAT32)
def static(job):
    """cache_implementation="static": keys and values are written in place into memory of full length."""
    return generating(job, LlamaConfig(**LLAMA), cache_implementation="static", disable_compile=True)


@recipe(KIND, "GPT-2 generates without a cache")
def plain(job):
    """use_cache=False: each token computes all before it anew; dropout in training."""
    return generating(job, GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), use_cache=False)


@recipe(
    KIND,
    "generation that ends where an end token is found",
    refused=Refused(
        r"unfinished_sequences.max\(\) == 0\)\n.*model.generation_config.eos_token_id = None",
        "How many tokens are computed would depend on what they are.",
        "`model.generation_config.eos_token_id = None` and `.pad_token_id = None`; cut the answers afterwards.",
    ),
)
def ends(job):
    """A number of new tokens that an end token may cut short."""
    return generating(job, LlamaConfig(**LLAMA), eos_token_id=2, pad_token_id=0)
