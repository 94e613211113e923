"""One of two ranks: gathers the samples of an epoch for a metric, and prints them.

torchrun metrics_script.py FILE UNEVEN
"""

import json
import sys

import accelerate
import torch

from gdsdata import GDSDataset, Sharding
from gdsdata.formats import Records
from gdsdata.integrations.accelerate import prepare

accelerator = accelerate.Accelerator(cpu=True)
records = Records("f4", (1,))
found = {}
for uneven in sys.argv[2:]:
    dataset = GDSDataset(sys.argv[1], 8, records, device="cpu", sharding=Sharding(uneven=uneven))
    gathered = [accelerator.gather_for_metrics(batch) for batch in prepare(accelerator, dataset)]
    found[uneven] = torch.cat(gathered)[:, 0].int().tolist()
if accelerator.is_main_process:
    print("gathered", json.dumps(found))
