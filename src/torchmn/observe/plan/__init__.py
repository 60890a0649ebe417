"""Predict training on another cluster with the model of `torchmn.exchange.auto.predict`."""
