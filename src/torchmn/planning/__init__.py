"""What a training would take elsewhere: the model of `torchmn.autotune.predict`, applied."""
