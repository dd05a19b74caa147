"""Networks that rheoscope trains: eight kinds of attention in one decoder, an ordinary transformers model.

Importing it registers the model type `rheoscope_decoder` with transformers' Auto classes.
"""

from .config import KINDS as KINDS
from .config import LINEAR_KINDS as LINEAR_KINDS
from .config import RheoscopeConfig as RheoscopeConfig
from .decoder import RheoscopeForCausalLM as RheoscopeForCausalLM
from .decoder import RheoscopeModel as RheoscopeModel
from .presets import PRESETS as PRESETS
from .presets import preset_config as preset_config
from .ranks import training_ranks as training_ranks
from .recipe import Recipe as Recipe
from .train import Trained as Trained
from .train import train as train
