BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('acf3f17fdcc7');
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
INSERT INTO "latest_metrics" VALUES('accuracy',0.7,1795166365533,2,0,'4a0c99bf59d04da6af3fadf93876e402');
INSERT INTO "latest_metrics" VALUES('loss',1.0,1795166366593,0,0,'4a0c99bf59d04da6af3fadf93876e402');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795166366655,0,0,'4a0c99bf59d04da6af3fadf93876e402');
INSERT INTO "latest_metrics" VALUES('accuracy',0.71,1795166366797,2,0,'02bd0a01ae584623bcb29ca0771e91a6');
INSERT INTO "latest_metrics" VALUES('loss',0.0,1795166366838,0,1,'02bd0a01ae584623bcb29ca0771e91a6');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795166366879,0,0,'02bd0a01ae584623bcb29ca0771e91a6');
INSERT INTO "latest_metrics" VALUES('accuracy',0.72,1795166367018,2,0,'1988a6a6bd9c4d39b8946250b36ecd3b');
INSERT INTO "latest_metrics" VALUES('loss',1.0,1795166367047,0,0,'1988a6a6bd9c4d39b8946250b36ecd3b');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795166367079,0,0,'1988a6a6bd9c4d39b8946250b36ecd3b');
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
	run_link VARCHAR(500), storage_location VARCHAR(500), 
	CONSTRAINT model_version_pk PRIMARY KEY (name, version), 
	FOREIGN KEY(name) REFERENCES registered_models (name) ON UPDATE CASCADE
);
INSERT INTO "model_versions" VALUES('speech recogniser',1,1795166367463,1795166367808,'',NULL,'Archived','mlflow-artifacts:/0/4a0c99bf59d04da6af3fadf93876e402/artifacts/model','4a0c99bf59d04da6af3fadf93876e402','READY',NULL,'','mlflow-artifacts:/0/4a0c99bf59d04da6af3fadf93876e402/artifacts/model');
INSERT INTO "model_versions" VALUES('speech recogniser',2,1795166367514,1795166367844,'## Recogniser

Trained on *all* hours.
	See the run.',NULL,'Production','s3://models/1','02bd0a01ae584623bcb29ca0771e91a6','READY',NULL,'','s3://models/1');
INSERT INTO "model_versions" VALUES('speech recogniser',3,1795166367598,1795166367895,'',NULL,'Staging','mlflow-artifacts:/0/1988a6a6bd9c4d39b8946250b36ecd3b/artifacts/model','1988a6a6bd9c4d39b8946250b36ecd3b','READY',NULL,'','mlflow-artifacts:/0/1988a6a6bd9c4d39b8946250b36ecd3b/artifacts/model');
INSERT INTO "model_versions" VALUES('speech recogniser',4,1795166367642,1795166368046,NULL,NULL,'Deleted_Internal','REDACTED-SOURCE-PATH','REDACTED-RUN-ID','READY',NULL,'REDACTED-RUN-LINK','s3://models/3');
INSERT INTO "model_versions" VALUES('classifier',1,1795166367691,1795166367691,'',NULL,'None','s3://models/9','4a0c99bf59d04da6af3fadf93876e402','READY',NULL,'','s3://models/9');
INSERT INTO "model_versions" VALUES('no:colon',1,1795166367771,1795166367771,'',NULL,'None','s3://models/odd','','READY',NULL,'','s3://models/odd');
CREATE TABLE registered_model_aliases (
	alias VARCHAR(256) NOT NULL, 
	version INTEGER NOT NULL, 
	name VARCHAR(256) NOT NULL, 
	CONSTRAINT registered_model_alias_pk PRIMARY KEY (name, alias), 
	CONSTRAINT registered_model_alias_name_fkey FOREIGN KEY(name) REFERENCES registered_models (name) ON DELETE cascade ON UPDATE cascade
);
INSERT INTO "registered_model_aliases" VALUES('champion',2,'speech recogniser');
INSERT INTO "registered_model_aliases" VALUES('Challenger',3,'speech recogniser');
INSERT INTO "registered_model_aliases" VALUES('best-so_far',2,'speech recogniser');
INSERT INTO "registered_model_aliases" VALUES('gone',4,'speech recogniser');
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
INSERT INTO "registered_models" VALUES('speech recogniser',1795166367134,1795166368046,'## Recogniser

Trained on *all* hours.
	See the run.');
INSERT INTO "registered_models" VALUES('classifier',1795166367187,1795166367691,'');
INSERT INTO "registered_models" VALUES('no:colon',1795166367355,1795166367771,'');
INSERT INTO "registered_models" VALUES('without versions',1795166367393,1795166367393,'');
CREATE INDEX index_latest_metrics_run_uuid ON latest_metrics (run_uuid);
COMMIT;
