"""Feed: text from files, tables, the hub or Python's own manual → token windows with document numbers and a hash."""

from rheoscope.corpus.document import Document as Document
from rheoscope.corpus.reading import read as read
from rheoscope.corpus.tokens import Framing as Framing
from rheoscope.corpus.windows import Batch as Batch
from rheoscope.corpus.windows import Corpus as Corpus
from rheoscope.corpus.windows import batches as batches
