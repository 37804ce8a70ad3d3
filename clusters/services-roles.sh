#!/bin/sh
# Of clusters/docker-compose.yaml: the roles and databases of sweeps/servers/roles.py, made once, by psql.
set -eu
psql -v ON_ERROR_STOP=1 --username dpgcl_admin --dbname postgres <<SQL
CREATE ROLE mlflow LOGIN PASSWORD '$MLFLOW_PASSWORD';
CREATE ROLE ledger_owner LOGIN PASSWORD '$OWNER_PASSWORD';
CREATE ROLE ledger_writer LOGIN PASSWORD '$WRITER_PASSWORD';
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE ledger OWNER ledger_owner;
REVOKE ALL ON DATABASE mlflow FROM PUBLIC;
GRANT CONNECT ON DATABASE mlflow TO mlflow;
REVOKE ALL ON DATABASE ledger FROM PUBLIC;
GRANT CONNECT ON DATABASE ledger TO ledger_writer;
\connect ledger
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT CREATE ON SCHEMA public TO ledger_owner;
ALTER DEFAULT PRIVILEGES FOR ROLE ledger_owner GRANT SELECT, INSERT ON TABLES TO ledger_writer;
SQL
