"""The parts that all sweeps share: options, storage, the plan of trials, their execution and release."""
