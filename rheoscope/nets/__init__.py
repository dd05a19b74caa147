"""Networks that rheoscope trains: eight kinds of attention in one decoder, an ordinary transformers model.

Importing it registers the model type `rheoscope_decoder` with transformers' Auto classes. Training is in
`rheoscope.nets.train`, as it takes longer to import.
"""

from .config import KINDS as KINDS
from .config import LINEAR_KINDS as LINEAR_KINDS
from .config import RheoscopeConfig as RheoscopeConfig
from .decoder import RheoscopeForCausalLM as RheoscopeForCausalLM
from .decoder import RheoscopeModel as RheoscopeModel
from .presets import PRESETS as PRESETS
from .presets import preset_config as preset_config
