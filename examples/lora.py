"""Convert a model, and adapt it to new classes by LoRA: factors stay as they are, adapters and the head are trained.

python examples/lora.py --data FOLDER
"""

import argparse
from pathlib import Path

import timm
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import flysurgery
from flysurgery.evaluation import preparation
from flysurgery.peft import lora_config

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, required=True, help="one folder of images for each class")
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("checkpoints/lora"))
parser.add_argument("--tiny", action="store_true", help="a small model of random weights, to see in seconds that this runs")
options = parser.parse_args()

classes = len(ImageFolder(options.data).classes)
model = timm.create_model(options.model, pretrained=not options.tiny, num_classes=classes, **(TINY if options.tiny else {}))
flysurgery.convert(model, "monarch")
flysurgery.save(model, options.out / "base", force=True)

# `lora_config` tells peft of converted layers. Merged layers would be dense, so the adapters stay beside the factors.
settings = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["head"])
adapted = get_peft_model(model, lora_config(model, settings))
adapted.print_trainable_parameters()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
adapted.to(device)
loader = DataLoader(ImageFolder(options.data, preparation(model).transform()), batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-3)
for epoch in range(options.epochs):
    adapted.train()
    for images, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(adapted(images.to(device)), labels.to(device)).backward()
        optimizer.step()
    print(f"epoch {epoch}: {flysurgery.evaluate(adapted, loader)}")
adapted.save_pretrained(options.out / "adapter")
print(f"saved in {options.out}")
