"""``python -m blockattn_rag``: the command line without the console script."""

from blockattn_rag.app.cli import main

if __name__ == "__main__":
    main()
