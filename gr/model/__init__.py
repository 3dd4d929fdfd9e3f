"""One decoder, interchangeable blocks. Read ``layout.py``, then ``blocks/hstu.py``."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from gr.model.causal_lm import GRForCausalLM, GRModel
from gr.model.config import GRConfig
from gr.model.layout import Layout, causal_layout

__all__ = ["GRConfig", "GRForCausalLM", "GRModel", "Layout", "causal_layout", "register"]


def register() -> None:
    """Make the Auto classes know ``model_type: gr``."""
    AutoConfig.register("gr", GRConfig, exist_ok=True)
    AutoModel.register(GRConfig, GRModel, exist_ok=True)
    AutoModelForCausalLM.register(GRConfig, GRForCausalLM, exist_ok=True)
