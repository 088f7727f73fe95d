"""Converted models on disk: self-describing safetensors folders, and what timm opens them by."""

from flysurgery.checkpoint.base import TRANSFORMERS as TRANSFORMERS
from flysurgery.checkpoint.base import build_base as build_base
from flysurgery.checkpoint.base import build_random as build_random
from flysurgery.checkpoint.base import check_base as check_base
from flysurgery.checkpoint.base import transformers_class as transformers_class
from flysurgery.checkpoint.config import PROCESSOR as PROCESSOR
from flysurgery.checkpoint.config import describe_images as describe_images
from flysurgery.checkpoint.config import vouch_for_weights as vouch_for_weights
from flysurgery.checkpoint.dense import check_dense_folder as check_dense_folder
from flysurgery.checkpoint.dense import load_dense as load_dense
from flysurgery.checkpoint.dense import load_weights as load_weights
from flysurgery.checkpoint.dense import save_dense as save_dense
from flysurgery.checkpoint.files import parse_json as parse_json
from flysurgery.checkpoint.files import read_json as read_json
from flysurgery.checkpoint.folder import check_space as check_space
from flysurgery.checkpoint.load import is_converted as is_converted
from flysurgery.checkpoint.load import load as load
from flysurgery.checkpoint.save import check_folder as check_folder
from flysurgery.checkpoint.save import push_to_hub as push_to_hub
from flysurgery.checkpoint.save import read_report as read_report
from flysurgery.checkpoint.save import save as save
from flysurgery.checkpoint.tensors import read_device as read_device
from flysurgery.checkpoint.timm_entry import build_for_timm as build_for_timm
