"""Mergeable accumulators (update, merge, finalize), ratios of sums, document bootstrap."""

from .accumulators import Accumulator as Accumulator
from .accumulators import Histogram as Histogram
from .accumulators import HistogramCounts as HistogramCounts
from .accumulators import Mean as Mean
from .accumulators import Moments as Moments
from .documents import DocumentSums as DocumentSums
from .documents import PerDocument as PerDocument
from .documents import RatioOfSums as RatioOfSums
from .estimates import Estimate as Estimate
from .estimates import Interval as Interval
from .estimates import bootstrap_ratio as bootstrap_ratio
from .estimates import paired_difference as paired_difference
from .estimates import ratio_of_sums as ratio_of_sums
from .lags import lag_counts as lag_counts
from .lags import lag_sums as lag_sums
