"""gr: a generative recommender that is a Hugging Face decoder over semantic IDs and actions.

Importing this package makes ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM`` and
``AutoTokenizer`` know its model and tokenizer.
"""

from gr.data.schema import Event
from gr.model import GRConfig, GRForCausalLM, GRModel
from gr.model import register as _register_model

__version__ = "0.1.0"

__all__ = ["Event", "GRConfig", "GRForCausalLM", "GRModel"]

_register_model()
