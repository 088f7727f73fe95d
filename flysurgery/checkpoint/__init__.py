"""Converted models on disk: self-describing safetensors folders, and what timm opens them by."""

from flysurgery.checkpoint.base import TRANSFORMERS, build_base, build_random, check_base, transformers_class
from flysurgery.checkpoint.config import PROCESSOR, describe_images, vouch_for_weights
from flysurgery.checkpoint.dense import check_dense_folder, load_dense, load_weights, save_dense
from flysurgery.checkpoint.files import check_space, parse_json, read_json
from flysurgery.checkpoint.load import build_for_timm, is_converted, load
from flysurgery.checkpoint.save import check_folder, push_to_hub, read_report, save
from flysurgery.checkpoint.tensors import read_device

__all__ = ["load", "load_weights", "push_to_hub", "save"]
