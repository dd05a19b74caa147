"""Mergeable accumulators (update, merge, finalize), ratios of sums, document bootstrap."""

from rheoscope.stats.accumulators import Accumulator as Accumulator
from rheoscope.stats.accumulators import Histogram as Histogram
from rheoscope.stats.accumulators import HistogramCounts as HistogramCounts
from rheoscope.stats.accumulators import Mean as Mean
from rheoscope.stats.accumulators import Moments as Moments
from rheoscope.stats.documents import Counts as Counts
from rheoscope.stats.documents import DocumentSums as DocumentSums
from rheoscope.stats.documents import PerDocument as PerDocument
from rheoscope.stats.documents import RatioOfSums as RatioOfSums
from rheoscope.stats.documents import windows_of_documents as windows_of_documents
from rheoscope.stats.estimates import Estimate as Estimate
from rheoscope.stats.estimates import Interval as Interval
from rheoscope.stats.estimates import bootstrap_ratio as bootstrap_ratio
from rheoscope.stats.estimates import paired_difference as paired_difference
from rheoscope.stats.estimates import ratio_of_sums as ratio_of_sums
from rheoscope.stats.kept import OWN as OWN
from rheoscope.stats.kept import filled as filled
from rheoscope.stats.kept import restore as restore
from rheoscope.stats.kept import state_of as state_of
from rheoscope.stats.kept import take_in as take_in
from rheoscope.stats.lags import lag_counts as lag_counts
from rheoscope.stats.lags import lag_sums as lag_sums
