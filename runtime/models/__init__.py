"""Models: configuration, weights, tokenizer and the store that fetches known models by name.

``resolve_model`` turns a name or path into a folder or GGUF file, ``open_model`` reads and checks it; :mod:`.store` is
the cache.
"""

from __future__ import annotations

from forebay.specs.errors import ModelUnavailable

from .chat_template import ChatTemplates
from .config import ModelConfig
from .llama_tensors import expected_tensors
from .model_folder import ModelFolder, open_gguf_model, open_model, open_model_folder
from .progress import Phase, ProgressCallback
from .safetensors_folder import SafetensorsFolder
from .store import ModelRecord, fetch, list_models, resolve_model
from .tokenizer import TextStream, Tokenizer
from .weights import Weights

__all__ = [
    "ChatTemplates",
    "ModelConfig",
    "ModelFolder",
    "ModelRecord",
    "ModelUnavailable",
    "Phase",
    "ProgressCallback",
    "SafetensorsFolder",
    "TextStream",
    "Tokenizer",
    "Weights",
    "expected_tensors",
    "fetch",
    "list_models",
    "open_gguf_model",
    "open_model",
    "open_model_folder",
    "resolve_model",
]
