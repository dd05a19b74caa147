"""The sections of a report, in reading order. An instrument joins with one row here and a file of figures."""

from __future__ import annotations

from .figures_fields import FIELDS
from .figures_loss import LOSS
from .figures_routing import ROUTING
from .figures_sinks import SINKS
from .figures_steering import STEERING
from .figures_steering_ablation import ABLATION
from .figures_steering_criticals import CRITICALS
from .panels import Section

SECTIONS: tuple[Section, ...] = (LOSS, ROUTING, FIELDS, SINKS, STEERING, ABLATION, CRITICALS)
