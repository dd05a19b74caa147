"""The sections of a report, in reading order. An instrument joins with one row here and a file of figures."""

from __future__ import annotations

from rheoscope.report.figures_fields import FIELDS
from rheoscope.report.figures_loss import LOSS
from rheoscope.report.figures_routing import ROUTING
from rheoscope.report.figures_sinks import SINKS
from rheoscope.report.figures_steering import STEERING
from rheoscope.report.figures_steering_ablation import ABLATION
from rheoscope.report.figures_steering_criticals import CRITICALS
from rheoscope.report.panels import Section

SECTIONS: tuple[Section, ...] = (LOSS, ROUTING, FIELDS, SINKS, STEERING, ABLATION, CRITICALS)
