"""Operating runs: launch on clusters, copies of runs, Prometheus, certificates and signatures of a site."""
