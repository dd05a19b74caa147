"""The sections of a report, in reading order. An instrument joins with one row here and a file of figures."""

from __future__ import annotations

from .figures_fields import FIELDS
from .figures_loss import LOSS
from .figures_routing import ROUTING
from .panels import Section

SECTIONS: tuple[Section, ...] = (LOSS, ROUTING, FIELDS)
