"""Everything that is fitted after training: lam, calibration, thresholds, effort."""
