"""Members on machines that share no network: processes here, one URL for all, launchers elsewhere.

- ``local``: train one member, or several as processes of this machine; ``slots``: machines lent for a limited time
- ``shared``, ``lease``, ``publish``: what a run has at ``remote``, the claim to a member, what a member sends there
- ``job``, ``launch``, ``launchers``: start members on other machines
- ``plan``: needs before anything is rented; ``status``, ``page``: how far members are
"""
