"""Networks that rheoscope trains: eight kinds of attention in one decoder, an ordinary transformers model.

Importing it registers the model type `rheoscope_decoder` with transformers' Auto classes. Training is in
`rheoscope.nets.train`, as it takes longer to import.
"""

from rheoscope.nets.config import KINDS as KINDS
from rheoscope.nets.config import LINEAR_KINDS as LINEAR_KINDS
from rheoscope.nets.config import RheoscopeConfig as RheoscopeConfig
from rheoscope.nets.decoder import RheoscopeForCausalLM as RheoscopeForCausalLM
from rheoscope.nets.decoder import RheoscopeModel as RheoscopeModel
from rheoscope.nets.presets import PRESETS as PRESETS
from rheoscope.nets.presets import preset_config as preset_config
