"""Networks that rheoscope trains: seven kinds of attention in one decoder, an ordinary transformers model."""
