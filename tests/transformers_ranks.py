"""A model of transformers that is split over ranks, by gdsdata and by transformers alone.

    torchrun --standalone --nproc-per-node=2 tests/transformers_ranks.py MODEL FOLDER

Each rank writes FOLDER/rank-R.json: the values that it has, which are its shards, by each way.
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

import gdsdata
from gdsdata.integrations import transformers as ours


def loaded(call, model):
    """Return the local values, and how many of them are shards."""
    made = call(transformers.LlamaForCausalLM, model)
    found, sharded = {}, 0
    for name, one in made.named_parameters():
        sharded += hasattr(one, "to_local")
        found[name] = (one.to_local() if hasattr(one, "to_local") else one).tolist()
    with torch.no_grad():
        found["logits"] = made(input_ids=torch.arange(10).view(2, 5)).logits.tolist()
    return found, sharded


def main(model, folder):
    by_stock, sharded = loaded(lambda kind, path: kind.from_pretrained(path, tp_plan="auto"), model)
    by_ours, _ = loaded(lambda kind, path: ours.from_pretrained(kind, path, tp_plan="auto"), model)
    with gdsdata.torch_hooks(safetensors=True) as hooks:
        by_hooks, _ = loaded(lambda kind, path: kind.from_pretrained(path, tp_plan="auto"), model)
    served = hooks.report().served["safetensors.safe_open"]
    found = {
        "sharded": sharded,
        "values": sum(len(torch.tensor(one).flatten()) for name, one in by_stock.items() if name != "logits"),
        "from_pretrained is the same": by_ours == by_stock,
        "hooks are the same": by_hooks == by_stock,
        "read": served.bytes,
        "left": [one.call for one in hooks.report().left_to_torch],
    }
    (Path(folder) / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(*sys.argv[1:])
