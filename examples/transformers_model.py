"""Convert a model of transformers, and open it again by transformers' own calls.

python examples/transformers_model.py --model google/vit-base-patch16-224
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageClassification

import flysurgery

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256, "image_size": 32, "patch_size": 8}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="google/vit-base-patch16-224", help="a name on the hub, or a folder")
parser.add_argument("--out", type=Path, default=Path("checkpoints/transformers_model"))
parser.add_argument("--tiny", action="store_true", help="a small model of random weights, to see in seconds that this runs")
options = parser.parse_args()

if options.tiny:
    model = AutoModelForImageClassification.from_config(AutoConfig.for_model("vit", **TINY))
else:
    model = AutoModelForImageClassification.from_pretrained(options.model)
model.eval()

print(flysurgery.convert(model, "monarch"))
model.save_pretrained(options.out)  # the configuration carries the plan

# In another program, `import flysurgery` comes first, so that transformers knows how to read the folder.
again = AutoModelForImageClassification.from_pretrained(options.out)
images = torch.randn(2, model.config.num_channels, model.config.image_size, model.config.image_size)
with torch.inference_mode():
    difference = (model(images).logits - again(images).logits).abs().max()
print(f"saved in {options.out}; the opened model's scores differ by {difference:.1e}")
