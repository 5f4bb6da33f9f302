"""Other libraries' models on our ranks and pages, one package for each library."""
