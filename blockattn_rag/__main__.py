"""Entry point for ``python -m blockattn_rag``."""

from blockattn_rag.app.cli import main

if __name__ == "__main__":
    main()
