BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('97727af70f4d');
CREATE TABLE "latest_metrics" (
	"key" VARCHAR(250) NOT NULL, 
	value FLOAT NOT NULL, 
	timestamp BIGINT, 
	step BIGINT NOT NULL, 
	is_nan BOOLEAN NOT NULL, 
	run_uuid VARCHAR(32) NOT NULL, 
	CONSTRAINT latest_metric_pk PRIMARY KEY ("key", run_uuid), 
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid), 
	CHECK (is_nan IN (0, 1))
);
INSERT INTO "latest_metrics" VALUES('accuracy',0.7,1795166387075,2,0,'9d0de6e23c874f4e9d40987a290afc30');
INSERT INTO "latest_metrics" VALUES('loss',1.0,1795166387131,0,0,'9d0de6e23c874f4e9d40987a290afc30');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795166387176,0,0,'9d0de6e23c874f4e9d40987a290afc30');
INSERT INTO "latest_metrics" VALUES('accuracy',0.71,1795166388334,2,0,'507fc23adab146d58af52e1a7ebec86a');
INSERT INTO "latest_metrics" VALUES('loss',0.0,1795166388390,0,1,'507fc23adab146d58af52e1a7ebec86a');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795166388439,0,0,'507fc23adab146d58af52e1a7ebec86a');
INSERT INTO "latest_metrics" VALUES('accuracy',0.72,1795166388642,2,0,'3b490b6b2b65454889decbb906d5ca4b');
INSERT INTO "latest_metrics" VALUES('loss',1.0,1795166388689,0,0,'3b490b6b2b65454889decbb906d5ca4b');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795166388740,0,0,'3b490b6b2b65454889decbb906d5ca4b');
CREATE TABLE model_version_tags (
	"key" VARCHAR(250) NOT NULL, 
	value VARCHAR(5000), 
	name VARCHAR(256) NOT NULL, 
	version INTEGER NOT NULL, 
	CONSTRAINT model_version_tag_pk PRIMARY KEY ("key", name, version), 
	FOREIGN KEY(name, version) REFERENCES model_versions (name, version) ON UPDATE cascade
);
INSERT INTO "model_version_tags" VALUES('team','vision','speech recogniser',1);
INSERT INTO "model_version_tags" VALUES('empty','','speech recogniser',1);
INSERT INTO "model_version_tags" VALUES('sign ü','value 0','speech recogniser',1);
INSERT INTO "model_version_tags" VALUES('team','vision','speech recogniser',2);
INSERT INTO "model_version_tags" VALUES('empty','','speech recogniser',2);
INSERT INTO "model_version_tags" VALUES('sign ü','value 1','speech recogniser',2);
INSERT INTO "model_version_tags" VALUES('team','vision','speech recogniser',3);
INSERT INTO "model_version_tags" VALUES('empty','','speech recogniser',3);
INSERT INTO "model_version_tags" VALUES('sign ü','value 2','speech recogniser',3);
INSERT INTO "model_version_tags" VALUES('team','vision','speech recogniser',4);
INSERT INTO "model_version_tags" VALUES('empty','','speech recogniser',4);
INSERT INTO "model_version_tags" VALUES('sign ü','value 3','speech recogniser',4);
INSERT INTO "model_version_tags" VALUES('team','vision','classifier',1);
INSERT INTO "model_version_tags" VALUES('empty','','classifier',1);
INSERT INTO "model_version_tags" VALUES('sign ü','value 9','classifier',1);
CREATE TABLE "model_versions" (
	name VARCHAR(256) NOT NULL, 
	version INTEGER NOT NULL, 
	creation_time BIGINT, 
	last_updated_time BIGINT, 
	description VARCHAR(5000), 
	user_id VARCHAR(256), 
	current_stage VARCHAR(20), 
	source VARCHAR(500), 
	run_id VARCHAR(32), 
	status VARCHAR(20), 
	status_message VARCHAR(500), 
	run_link VARCHAR(500), 
	CONSTRAINT model_version_pk PRIMARY KEY (name, version), 
	FOREIGN KEY(name) REFERENCES registered_models (name) ON UPDATE CASCADE
);
INSERT INTO "model_versions" VALUES('speech recogniser',1,1795166389192,1795166389585,'',NULL,'Archived','/work/mlflow/run1/art/0/9d0de6e23c874f4e9d40987a290afc30/artifacts/model','9d0de6e23c874f4e9d40987a290afc30','READY',NULL,'');
INSERT INTO "model_versions" VALUES('speech recogniser',2,1795166389235,1795166389643,'## Recogniser

Trained on *all* hours.
	See the run.',NULL,'Production','s3://models/1','507fc23adab146d58af52e1a7ebec86a','READY',NULL,'');
INSERT INTO "model_versions" VALUES('speech recogniser',3,1795166389331,1795166389708,'',NULL,'Staging','/work/mlflow/run1/art/0/3b490b6b2b65454889decbb906d5ca4b/artifacts/model','3b490b6b2b65454889decbb906d5ca4b','READY',NULL,'');
INSERT INTO "model_versions" VALUES('speech recogniser',4,1795166389370,1795166389756,NULL,NULL,'Deleted_Internal','REDACTED-SOURCE-PATH','REDACTED-RUN-ID','READY',NULL,'REDACTED-RUN-LINK');
INSERT INTO "model_versions" VALUES('classifier',1,1795166389431,1795166389431,'',NULL,'None','s3://models/9','9d0de6e23c874f4e9d40987a290afc30','READY',NULL,'');
INSERT INTO "model_versions" VALUES('no:colon',1,1795166389535,1795166389535,'',NULL,'None','s3://models/odd','','READY',NULL,'');
CREATE TABLE registered_model_tags (
	"key" VARCHAR(250) NOT NULL, 
	value VARCHAR(5000), 
	name VARCHAR(256) NOT NULL, 
	CONSTRAINT registered_model_tag_pk PRIMARY KEY ("key", name), 
	FOREIGN KEY(name) REFERENCES registered_models (name) ON UPDATE cascade
);
INSERT INTO "registered_model_tags" VALUES('task','speech','speech recogniser');
CREATE TABLE registered_models (
	name VARCHAR(256) NOT NULL, 
	creation_time BIGINT, 
	last_updated_time BIGINT, 
	description VARCHAR(5000), 
	CONSTRAINT registered_model_pk PRIMARY KEY (name), 
	UNIQUE (name)
);
INSERT INTO "registered_models" VALUES('speech recogniser',1795166388827,1795166389756,'## Recogniser

Trained on *all* hours.
	See the run.');
INSERT INTO "registered_models" VALUES('classifier',1795166388894,1795166389431,'');
INSERT INTO "registered_models" VALUES('no:colon',1795166389062,1795166389535,'');
INSERT INTO "registered_models" VALUES('without versions',1795166389111,1795166389111,'');
CREATE INDEX index_latest_metrics_run_uuid ON latest_metrics (run_uuid);
COMMIT;
