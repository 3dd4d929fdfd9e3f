"""Every operation of ``gr.kernels`` beside its naive form: ``python benchmarks/kernels.py``.

All of it is in ``kernel_times.py``. transformers looks for a package of this name and imports what
it finds, so nothing may happen here before it is run.
"""

if __name__ == "__main__":
    from kernel_times import main

    main()
