BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('dc11669786a5');
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
INSERT INTO "latest_metrics" VALUES('accuracy',0.7,1795165837246,2,0,'d828664a9020469fabfe0ab8846c7b51');
INSERT INTO "latest_metrics" VALUES('loss',1.0,1795165837641,0,0,'d828664a9020469fabfe0ab8846c7b51');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795165837962,0,0,'d828664a9020469fabfe0ab8846c7b51');
INSERT INTO "latest_metrics" VALUES('accuracy',0.71,1795165839014,2,0,'2ab0584833bf445fa0b6bb6c52ea31fa');
INSERT INTO "latest_metrics" VALUES('loss',0.0,1795165839150,0,1,'2ab0584833bf445fa0b6bb6c52ea31fa');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795165839266,0,0,'2ab0584833bf445fa0b6bb6c52ea31fa');
INSERT INTO "latest_metrics" VALUES('accuracy',0.72,1795165840002,2,0,'7494122f068c44518e0780c6c2e06124');
INSERT INTO "latest_metrics" VALUES('loss',1.0,1795165840061,0,0,'7494122f068c44518e0780c6c2e06124');
INSERT INTO "latest_metrics" VALUES('largest',1.79769313486231562234e+308,1795165840238,0,0,'7494122f068c44518e0780c6c2e06124');
CREATE TABLE "model_version_tags" (
	"key" VARCHAR(250) NOT NULL, 
	value TEXT, 
	name VARCHAR(256) NOT NULL, 
	version INTEGER NOT NULL, 
	workspace VARCHAR(63) DEFAULT 'default' NOT NULL, 
	CONSTRAINT model_version_tag_pk PRIMARY KEY (workspace, "key", name, version), 
	CONSTRAINT fk_model_version_tags_model_versions FOREIGN KEY(workspace, name, version) REFERENCES model_versions (workspace, name, version) ON UPDATE CASCADE
);
INSERT INTO "model_version_tags" VALUES('team','vision','speech recogniser',1,'default');
INSERT INTO "model_version_tags" VALUES('empty','','speech recogniser',1,'default');
INSERT INTO "model_version_tags" VALUES('sign ü','value 0','speech recogniser',1,'default');
INSERT INTO "model_version_tags" VALUES('team','vision','speech recogniser',2,'default');
INSERT INTO "model_version_tags" VALUES('empty','','speech recogniser',2,'default');
INSERT INTO "model_version_tags" VALUES('sign ü','value 1','speech recogniser',2,'default');
INSERT INTO "model_version_tags" VALUES('team','vision','speech recogniser',3,'default');
INSERT INTO "model_version_tags" VALUES('empty','','speech recogniser',3,'default');
INSERT INTO "model_version_tags" VALUES('sign ü','value 2','speech recogniser',3,'default');
INSERT INTO "model_version_tags" VALUES('team','vision','speech recogniser',4,'default');
INSERT INTO "model_version_tags" VALUES('empty','','speech recogniser',4,'default');
INSERT INTO "model_version_tags" VALUES('sign ü','value 3','speech recogniser',4,'default');
INSERT INTO "model_version_tags" VALUES('team','vision','classifier',1,'default');
INSERT INTO "model_version_tags" VALUES('empty','','classifier',1,'default');
INSERT INTO "model_version_tags" VALUES('sign ü','value 9','classifier',1,'default');
INSERT INTO "model_version_tags" VALUES('mlflow.prompt.is_prompt','true','greeting',1,'default');
INSERT INTO "model_version_tags" VALUES('_mlflow_prompt_type','text','greeting',1,'default');
INSERT INTO "model_version_tags" VALUES('mlflow.prompt.text','Hello {{name}}','greeting',1,'default');
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
	storage_location VARCHAR(500), 
	workspace VARCHAR(63) DEFAULT 'default' NOT NULL, 
	CONSTRAINT model_version_pk PRIMARY KEY (workspace, name, version), 
	CONSTRAINT fk_model_versions_registered_models FOREIGN KEY(workspace, name) REFERENCES registered_models (workspace, name) ON UPDATE CASCADE
);
INSERT INTO "model_versions" VALUES('speech recogniser',1,1795165841314,1795165843658,'',NULL,'Archived','mlflow-artifacts:/0/d828664a9020469fabfe0ab8846c7b51/artifacts/model','d828664a9020469fabfe0ab8846c7b51','READY',NULL,'','mlflow-artifacts:/0/d828664a9020469fabfe0ab8846c7b51/artifacts/model','default');
INSERT INTO "model_versions" VALUES('speech recogniser',2,1795165841567,1795165844650,'## Recogniser

Trained on *all* hours.
	See the run.',NULL,'Production','s3://models/1','2ab0584833bf445fa0b6bb6c52ea31fa','READY',NULL,'','s3://models/1','default');
INSERT INTO "model_versions" VALUES('speech recogniser',3,1795165842027,1795165845094,'',NULL,'Staging','mlflow-artifacts:/0/7494122f068c44518e0780c6c2e06124/artifacts/model','7494122f068c44518e0780c6c2e06124','READY',NULL,'','mlflow-artifacts:/0/7494122f068c44518e0780c6c2e06124/artifacts/model','default');
INSERT INTO "model_versions" VALUES('speech recogniser',4,1795165842328,1795165847896,NULL,NULL,'Deleted_Internal','REDACTED-SOURCE-PATH','REDACTED-RUN-ID','READY',NULL,'REDACTED-RUN-LINK','s3://models/3','default');
INSERT INTO "model_versions" VALUES('classifier',1,1795165842574,1795165842574,'',NULL,'None','s3://models/9','d828664a9020469fabfe0ab8846c7b51','READY',NULL,'','s3://models/9','default');
INSERT INTO "model_versions" VALUES('no@sign',1,1795165843252,1795165843252,'',NULL,'None','s3://models/odd','','READY',NULL,'','s3://models/odd','default');
INSERT INTO "model_versions" VALUES('classifier',2,1795165849491,1795165849491,'',NULL,'None','models:/m-e18cd9a3318043dba8d288a68f137650','d828664a9020469fabfe0ab8846c7b51','READY',NULL,'','mlflow-artifacts:/0/models/m-e18cd9a3318043dba8d288a68f137650/artifacts','default');
INSERT INTO "model_versions" VALUES('greeting',1,1795165904945,1795165904945,'',NULL,'None','dummy-source','','READY',NULL,'','dummy-source','default');
CREATE TABLE "registered_model_aliases" (
	alias VARCHAR(256) NOT NULL, 
	version INTEGER NOT NULL, 
	name VARCHAR(256) NOT NULL, 
	workspace VARCHAR(63) DEFAULT 'default' NOT NULL, 
	CONSTRAINT registered_model_alias_pk PRIMARY KEY (workspace, name, alias), 
	CONSTRAINT fk_registered_model_aliases_registered_models FOREIGN KEY(workspace, name) REFERENCES registered_models (workspace, name) ON DELETE CASCADE ON UPDATE CASCADE
);
INSERT INTO "registered_model_aliases" VALUES('champion',2,'speech recogniser','default');
INSERT INTO "registered_model_aliases" VALUES('Challenger',3,'speech recogniser','default');
INSERT INTO "registered_model_aliases" VALUES('best-so_far',2,'speech recogniser','default');
CREATE TABLE "registered_model_tags" (
	"key" VARCHAR(250) NOT NULL, 
	value VARCHAR(5000), 
	name VARCHAR(256) NOT NULL, 
	workspace VARCHAR(63) DEFAULT 'default' NOT NULL, 
	CONSTRAINT registered_model_tag_pk PRIMARY KEY (workspace, "key", name), 
	CONSTRAINT fk_registered_model_tags_registered_models FOREIGN KEY(workspace, name) REFERENCES registered_models (workspace, name) ON UPDATE CASCADE
);
INSERT INTO "registered_model_tags" VALUES('task','speech','speech recogniser','default');
INSERT INTO "registered_model_tags" VALUES('mlflow.prompt.is_prompt','true','greeting','default');
INSERT INTO "registered_model_tags" VALUES('_mlflow_experiment_ids',',0,','greeting','default');
CREATE TABLE "registered_models" (
	name VARCHAR(256) NOT NULL, 
	creation_time BIGINT, 
	last_updated_time BIGINT, 
	description VARCHAR(5000), 
	workspace VARCHAR(63) DEFAULT 'default' NOT NULL, 
	CONSTRAINT registered_model_pk PRIMARY KEY (workspace, name)
);
INSERT INTO "registered_models" VALUES('speech recogniser',1795165840379,1795165847896,'## Recogniser

Trained on *all* hours.
	See the run.','default');
INSERT INTO "registered_models" VALUES('classifier',1795165840518,1795165849491,'','default');
INSERT INTO "registered_models" VALUES('no@sign',1795165840752,1795165843252,'','default');
INSERT INTO "registered_models" VALUES('without versions',1795165840939,1795165840939,'','default');
INSERT INTO "registered_models" VALUES('greeting',1795165904863,1795165904945,'','default');
CREATE INDEX index_latest_metrics_run_uuid ON latest_metrics (run_uuid);
CREATE INDEX idx_registered_models_workspace ON registered_models (workspace);
CREATE INDEX idx_model_version_tags_workspace_name_version ON model_version_tags (workspace, name, version);
CREATE INDEX idx_registered_model_tags_workspace_name ON registered_model_tags (workspace, name);
COMMIT;
