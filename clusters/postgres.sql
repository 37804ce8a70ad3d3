-- The two databases that a team shares, MLflow's and the ledger's, and who may do what in them. Run it once, with
-- psql as PostgreSQL's superuser; it reads three passwords from the environment: docs/cluster.md.
--
-- The ledger's table belongs to ledger_owner, a role that nobody uses once the table exists. Drivers are
-- ledger_writer: they read rows and add rows, and have no right to change, delete or truncate any, to drop the
-- table, or to switch off its triggers, which refuse all of that a second time.
\set ON_ERROR_STOP on
\getenv mlflow_password MLFLOW_PASSWORD
\getenv owner_password LEDGER_OWNER_PASSWORD
\getenv writer_password LEDGER_WRITER_PASSWORD

CREATE ROLE mlflow LOGIN PASSWORD :'mlflow_password';
CREATE ROLE ledger_owner LOGIN PASSWORD :'owner_password';
CREATE ROLE ledger_writer LOGIN PASSWORD :'writer_password';
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE ledger OWNER ledger_owner;
REVOKE ALL ON DATABASE mlflow, ledger FROM PUBLIC;
GRANT CONNECT ON DATABASE mlflow TO mlflow;
GRANT CONNECT ON DATABASE ledger TO ledger_writer;

\connect ledger
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT CREATE ON SCHEMA public TO ledger_owner;
ALTER DEFAULT PRIVILEGES FOR ROLE ledger_owner GRANT SELECT, INSERT ON TABLES TO ledger_writer;
