"""What a training would take elsewhere: the model of `torchmn.exchange.auto.predict`, applied."""
